"""equitape recipes, and the help of commands that take one."""

import pytest
import yaml

from command_line import call, invoke
from equitape.training.recipe import available_recipes, load_recipe
from equitape.version import __version__


def test_recipes_are_listed_and_shown(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    listed = call("recipes").output
    assert all(f" {name} " in listed for name in available_recipes())
    shown = yaml.safe_load(call("recipes", "show", "demo").output)
    assert shown["description"] == load_recipe("demo").description


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["show"], "recipes show NAME"), (["list"], "recipes show NAME"), (["show", "dmeo"], "Did you mean 'demo'")],
)
def test_wrong_arguments(arguments, message):
    assert message in invoke("recipes", *arguments, code=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["train", "demo", "--encoding", "alibi"],
            'For another one set encodings, for example "encodings=[rope,tape]".',
        ),
        (["compare", "lm-books"], "To try a recipe without its data, add --small."),
    ],
)
def test_errors_say_what_to_do_instead(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EQUITAPE_DATA", raising=False)
    assert message in invoke(*arguments, code=2)


def test_small_runs_say_that_their_scores_mean_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("EQUITAPE_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "small"
    one = ["--small", "encodings=rope", "train.steps=1", "--out"]
    assert "scores are meaningless" in invoke("compare", "demo", *one, out)
    shown = invoke("train", "demo", *one, tmp_path / "one")
    assert "scores are meaningless" in shown
    assert "bits per byte 1x ↓" in shown
    # the folder of a comparison is not that of a model, but holds some
    message = f"{str(out)!r} holds a comparison; give one of its runs, for example '{out / 'runs' / 'rope-seed0'}'."
    assert message.replace(" ", "") in invoke("check", out, code=2).replace(" ", "")


@pytest.mark.parametrize("command", ["train", "compare"])
def test_options_come_before_the_keys_of_the_recipe(command):
    shown = call(command, "--help").output
    assert 0 < shown.index("--dry-run") < shown.index("train.batch_size = 64")


def test_lists_need_no_brackets():
    for text in ("encodings=rope,tape", "encodings=[rope,tape]"):
        assert load_recipe("demo", [text]).encodings == ("rope", "tape")


def test_version():
    assert call("--version").output == f"equitape {__version__}\n"
