"""The command line, as a newcomer would type it."""

import json
import multiprocessing

import pytest

from command_line import call
from equitape import available_encodings
from equitape.training import recipe


def test_help_names_the_commands():
    result = call("--help")
    # in groups, the first steps first
    places = [result.output.index(f"│ {command} ") for command in ("demo", "compare", "extend", "eval", "encodings")]
    assert places == sorted(places)
    assert "Pretrained models" in result.output


def test_help_fills_its_lines(monkeypatch):
    """Whatever the width of the terminal: lines of a docstring are not those of the help."""
    monkeypatch.setenv("COLUMNS", "80")
    lines = [line.strip() for line in call("extend", "--help").output.partition("Arguments")[0].splitlines()]
    first = next(index for index, line in enumerate(lines) if line.startswith("Trains on short rows"))
    paragraph = lines[first : lines.index("", first)]
    assert len(paragraph) > 2
    assert all(len(line) > 60 for line in paragraph[:-1])


def test_encodings_as_table_and_json():
    table = call("encodings")
    assert all(kind in table.output for kind in available_encodings())
    listed = json.loads(call("encodings", "--json").output)
    assert set(listed) == set(available_encodings())
    assert listed["tape"]["scaling"]["kind"] == "default"


def read_column(output, index):
    """All of a column in one line without spaces, so that what was folded is whole again."""
    lines = [line.split("│") for line in output.splitlines() if line.startswith("│")]
    return "".join("".join(line[index + 1].split()) for line in lines)


@pytest.mark.parametrize("width", [80, 50, 200])
@pytest.mark.parametrize("listing", ["tasks", "encodings"])
def test_tables_lose_nothing_on_narrow_terminals(listing, width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    output = call(listing).output
    message = json.loads(call(listing, "--json").output)
    assert "…" not in output
    assert max(map(len, output.splitlines())) <= width
    # tasks have a column for what they can be used for
    first = 2 if listing == "tasks" else 1
    ideas, options = read_column(output, first), read_column(output, first + 1)
    for row in message.values():
        for name, value in row.get("options", row).items():
            assert isinstance(value, (list, dict)) or f"{name}={value}" in options
        if listing == "tasks":
            assert f"{row['idea'].replace(' ', '')}metric:{row['headline']}" in ideas
    if listing == "tasks" and width >= 80:
        # what fits is not broken in two
        assert all(part in output for part in ("batch_tokens=262144,", " error_outside_sparse "))


@pytest.mark.usefixtures("no_drawing")
def test_demo_trains_and_compares(tmp_path, monkeypatch):
    # processes that start as copies of this one start at once
    fork = multiprocessing.get_context("fork")
    monkeypatch.setattr("equitape.training.parallel.get_context", lambda _: fork)
    load, small = recipe.load_recipe, ["task.eval_tokens=2048", "model.num_hidden_layers=1", "train.batch_size=2"]
    monkeypatch.setattr(recipe, "load_recipe", lambda name, overrides: load(name, [*overrides, *small]))
    result = call("demo", "--steps", "2", "--out", tmp_path)
    for part in ("tape2", "rope, decay", "rope, both parts", "parameters", "16x", "demonstration"):
        assert part in result.output
    # every length of every encoding is in the table: a model of two steps knows a little less than the bytes' entropy
    rows = [line for line in result.output.splitlines() if line.startswith("│")]
    assert [sum(2 < float(cell) < 8.5 for cell in row.split("│")[-4:-1]) for row in rows] == [3, 3, 3, 3]


def test_wrong_input_exits_with_2():
    for arguments in (["demo", "--steps", "0"], ["demo", "--step", "3"], ["train-all"]):
        call(*arguments, code=2)
