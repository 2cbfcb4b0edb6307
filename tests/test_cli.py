"""The command line, as a newcomer would type it."""

import json
import multiprocessing

from typer.testing import CliRunner

from equitape import available_encodings
from equitape.cli import app

runner = CliRunner()


def test_help_names_the_commands():
    result = runner.invoke(app, ["--help"])
    assert result.exit_code == 0
    for command in ("encodings", "demo"):
        assert command in result.output


def test_encodings_as_table_and_json():
    table = runner.invoke(app, ["encodings"])
    assert table.exit_code == 0
    assert all(kind in table.output for kind in available_encodings())
    listed = json.loads(runner.invoke(app, ["encodings", "--json"]).output)
    assert set(listed) == set(available_encodings())
    assert listed["tape"]["scaling"]["kind"] == "default"


def test_demo_trains_compares_and_answers(tmp_path, monkeypatch):
    # processes that start as copies of this one start at once
    fork = multiprocessing.get_context("fork")
    monkeypatch.setattr("equitape.training.parallel.get_context", lambda _: fork)
    result = runner.invoke(app, ["demo", "--steps", "2", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    for part in ("nope", "rope", "tape", "parameters", "exact", "demonstration", " + "):
        assert part in result.output


def test_wrong_input_exits_with_2():
    for arguments in (["demo", "--steps", "0"], ["demo", "--step", "3"], ["train-all"]):
        assert runner.invoke(app, arguments).exit_code == 2
