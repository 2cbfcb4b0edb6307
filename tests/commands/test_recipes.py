"""equitape recipes, and the help of commands that take one."""

import pytest
import yaml
from typer.testing import CliRunner

from equitape.cli import app
from equitape.training.recipe import available_recipes, load_recipe
from equitape.version import __version__

runner = CliRunner()


def test_recipes_are_listed_and_shown(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    listed = runner.invoke(app, ["recipes"]).output
    assert all(f" {name} " in listed for name in available_recipes())
    shown = yaml.safe_load(runner.invoke(app, ["recipes", "show", "demo"]).output)
    assert shown["description"] == load_recipe("demo").description


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["show"], "recipes show NAME"), (["list"], "recipes show NAME"), (["show", "dmeo"], "Did you mean 'demo'")],
)
def test_wrong_arguments(arguments, message):
    result = runner.invoke(app, ["recipes", *arguments])
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize("command", ["train", "compare"])
def test_options_come_before_the_keys_of_the_recipe(command):
    shown = runner.invoke(app, [command, "--help"]).output
    assert 0 < shown.index("--dry-run") < shown.index("train.batch_size = 64")


def test_lists_need_no_brackets():
    for text in ("encodings=rope,tape", "encodings=[rope,tape]"):
        assert load_recipe("demo", [text]).encodings == ("rope", "tape")


def test_version():
    assert runner.invoke(app, ["--version"]).output == f"equitape {__version__}\n"
