import random
import sys

import pytest
from typer.testing import CliRunner

from equitape import registry as registries
from equitape.cli import app
from equitape.encodings import ENCODINGS, available_encodings
from equitape.registry import OWN, Registry, describe_choices


def test_names_are_unique_and_sorted():
    registry = Registry("thing")
    registry.register("b", 2)
    registry.register("a")(1)
    assert list(registry) == ["a", "b"]
    assert len(registry) == 2
    assert "a" in registry
    with pytest.raises(ValueError, match="thing 'a' is registered already"):
        registry.register("a", 3)
    registry.unregister("a")
    assert "a" not in registry


def test_unknown_names_list_near_matches():
    registry = Registry("thing")
    registry.register("rope", 1)
    with pytest.raises(ValueError, match=r"Unknown thing 'rop'. Did you mean 'rope'\? Allowed: rope."):
        registry["rop"]
    with pytest.raises(ValueError, match=r"Unknown thing 'xyz'. Allowed: rope."):
        registry["xyz"]


def test_names_with_commas_are_told_apart():
    assert describe_choices("x", ["tape, small", "rope"]) == " Allowed: rope, 'tape, small'."


def test_lazy_entries_are_imported_when_asked_for():
    registry = Registry("thing")
    registry.register("counter", "collections:Counter")
    from collections import Counter

    assert registry["counter"] is Counter


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A file with an encoding that the package does not have."""
    file = tmp_path / "my_encodings.py"
    file.write_text(
        "from equitape import register_encoding\n"
        "from equitape.encodings import PositionalEncoding\n"
        "@register_encoding('my_own')\n"
        "class MyOwn(PositionalEncoding):\n"
        "    idea = 'nothing at all'\n"
    )
    monkeypatch.setattr(registries, "_imported", set())
    monkeypatch.setenv(OWN, str(file))
    yield file
    if "my_own" in ENCODINGS._entries:
        ENCODINGS.unregister("my_own")


def test_encodings_of_ones_own_in_commands(own):
    assert "my_own" in available_encodings()
    assert ENCODINGS["my_own"].idea == "nothing at all"
    result = CliRunner().invoke(app, ["compare", "demo", "encodings=[rope,my_own]", "--dry-run"])
    assert result.exit_code == 0, result.output
    assert "my_own" in result.output


def test_a_file_that_breaks_is_not_hidden(own):
    own.write_text("raise RuntimeError('mine')")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="mine"):
            available_encodings()


def test_a_file_takes_no_module_s_place(own, monkeypatch):
    other = own.with_name("random.py")
    own.rename(other)
    monkeypatch.setenv(OWN, str(other))
    assert "my_own" in available_encodings()
    assert sys.modules["random"] is random


@pytest.mark.parametrize("name", ["nowhere.py", "no_such_module", "no_such.module", "a folder"])
def test_what_cannot_be_imported_is_named(name, own, monkeypatch):
    monkeypatch.setenv(OWN, name)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"{OWN} names '{name}', which is neither a Python file nor a module"):
            available_encodings()
    # also in commands that would not have looked for it
    result = CliRunner().invoke(app, ["compare", "demo", "--dry-run"])
    assert result.exit_code == 2
    assert f"{OWN} names '{name}'" in " ".join(result.output.replace("│", " ").split())


def test_unknown_names_tell_of_ones_own():
    with pytest.raises(ValueError, match="One of your own: name its file in EQUITAPE_IMPORT"):
        ENCODINGS["my_own"]
