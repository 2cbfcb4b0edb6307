"""Plugins: files, modules and installed packages that add encodings."""

import os
import random
import sys

import pytest

from command_line import call, in_one_line
from equitape import plugins
from equitape.encodings import ENCODINGS, available_encodings


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """A file with an encoding that the package does not have."""
    file = tmp_path / "my_encodings.py"
    file.write_text(
        "from equitape import register_encoding\n"
        "from equitape.encodings import PositionalEncoding\n"
        "@register_encoding('my_own')\n"
        "class MyOwn(PositionalEncoding):\n"
        "    idea = 'nothing at all'\n"
    )
    monkeypatch.setattr(plugins, "_imported", set())
    monkeypatch.setenv(plugins.VARIABLE, str(file))
    yield file
    if "my_own" in ENCODINGS._entries:
        ENCODINGS.unregister("my_own")


def test_encodings_of_plugins_in_commands(plugin, tmp_path):
    assert "my_own" in available_encodings()
    assert ENCODINGS["my_own"].idea == "nothing at all"
    folder = str(tmp_path / "runs")
    result = call("compare", "demo", "encodings=[rope,my_own]", "--dry-run", "--out", folder)
    assert "my_own" in result.output


def read(result):
    """Output without the box around errors."""
    return in_one_line(result.output)


@pytest.mark.parametrize("text", ["raise RuntimeError('mine')", "def broken(:\n", "import no_such_module"])
def test_a_file_that_breaks_ends_in_one_sentence(plugin, text):
    plugin.write_text(text)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^Plugin '.*my_encodings.py' failed to import: \w+Error: ") as caught:
            available_encodings()
        assert "\n" not in str(caught.value)
        assert caught.value.__cause__ is not None
    result = call("encodings", code=2)
    assert "failed to import" in read(result)


def test_the_option_import(plugin, monkeypatch):
    monkeypatch.setenv(plugins.VARIABLE, "")
    result = call("--import", plugin, "encodings")
    assert "nothing at all" in result.output
    # for processes that the command starts
    assert str(plugin) in os.environ[plugins.VARIABLE]


def test_entry_points_of_installed_packages(plugin, tmp_path, monkeypatch):
    monkeypatch.setenv(plugins.VARIABLE, "")
    package = tmp_path / "site"
    (package / "some_plugin-1.dist-info").mkdir(parents=True)
    (package / "some_plugin.py").write_text(plugin.read_text())
    (package / "some_plugin-1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: some-plugin\nVersion: 1\n"
    )
    (package / "some_plugin-1.dist-info" / "entry_points.txt").write_text("[equitape.plugins]\nmine = some_plugin\n")
    monkeypatch.syspath_prepend(package)
    assert "my_own" in available_encodings()


def test_arguments_that_are_not_utf8():
    result = call("compare", "demo", "name=\udcff", code=2)
    assert "is not valid UTF-8" in read(result)


def test_a_file_takes_no_module_s_place(plugin, monkeypatch):
    other = plugin.with_name("random.py")
    plugin.rename(other)
    monkeypatch.setenv(plugins.VARIABLE, str(other))
    assert "my_own" in available_encodings()
    assert sys.modules["random"] is random


@pytest.mark.parametrize("name", ["nowhere.py", "no_such_module", "no_such.module", "a folder"])
def test_what_cannot_be_imported_is_named(name, plugin, monkeypatch):
    monkeypatch.setenv(plugins.VARIABLE, name)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"Plugin '{name}'.* is neither a Python file nor an installed"):
            available_encodings()
    # also in commands that would not have looked for it
    result = call("compare", "demo", "--dry-run", code=2)
    assert f"Plugin '{name}'" in read(result)
