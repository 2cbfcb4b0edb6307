"""A full disk and a read-only place: one sentence, and nothing that was done is lost."""

import errno
import os
import shlex
import sys
from pathlib import Path

import pytest
import torch

from command_line import call, in_one_line
from equitape.evaluation import runner as evaluation
from equitape.runs import files
from equitape.training import checkpoints


def words_of(command, small_files, out):
    words = {
        "train": [small_files / "small.yaml"],
        "compare": [small_files / "small.yaml"],
        "eval": [
            small_files / "model",
            "--task",
            "perplexity",
            f"data={small_files / 'text.txt'}",
            "lengths=[16]",
            "short=8",
        ],
        "inspect": [small_files / "model", "--ids", "1 2 3", "--no-stability"],
        "adapt": [small_files / "model"],
        "demo": ["--steps", "1"],
    }[command]
    return [command, *map(str, words), "--out", str(out)]


def invoke(words, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["equitape", *words])
    result = call(*words, code=None)
    return result.exit_code, in_one_line(result.output)


def fill_disk(patch, owner, name, after):
    """Let a function fail for lack of space from the call with this number on."""
    function, calls = getattr(owner, name), []

    def counted(*arguments, **options):
        calls.append(name)
        if len(calls) > after:
            if owner is torch:
                raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 81856 vs 81748")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return function(*arguments, **options)

    patch.setattr(owner, name, counted)


@pytest.mark.parametrize(
    ("command", "owner", "name", "after", "kept"),
    [
        ("train", torch, "save", 0, "No checkpoint was written yet"),
        ("train", checkpoints, "publish", 1, "Kept the checkpoint of step 2"),
        ("compare", torch, "save", 0, "Kept 0 of 1 run in"),
        ("compare", checkpoints, "publish", 1, "Kept 0 of 1 run, and checkpoints of 1 more"),
        ("eval", evaluation, "add_cost", 0, "units in"),
    ],
)
def test_a_full_disk_loses_nothing(command, owner, name, after, kept, small_files, tmp_path, monkeypatch):
    monkeypatch.setenv("EQUITAPE_CACHE", str(tmp_path / "cache"))
    words = words_of(command, small_files, tmp_path / "out")
    with monkeypatch.context() as patch:
        fill_disk(patch, owner, name, after)
        code, said = invoke(words, patch)
    assert code == 1
    assert said.count("The disk is full") == 1
    assert kept in said
    again = words if command == "compare" else [*words, "--resume"]
    assert f"Continue with: {shlex.join(['equitape', *again])}" in said
    code, said = invoke(again, monkeypatch)
    assert code == 0, said
    done = {"train": "run.json", "compare": "results.json", "eval": "report.json"}
    assert (tmp_path / "out" / done[command]).exists()


@pytest.mark.parametrize("command", ["inspect", "adapt"])
def test_a_full_disk_is_named(command, small_files, tmp_path, monkeypatch):
    fill_disk(monkeypatch, Path, "write_bytes" if command == "inspect" else "mkdir", 0)
    code, said = invoke(words_of(command, small_files, tmp_path / "out"), monkeypatch)
    assert code == 1
    assert "The disk is full" in said


def test_a_line_cut_by_a_full_disk_is_evaluated_again(small_files, tmp_path, monkeypatch):
    """The rest of the file stays: nothing is written to cut it."""
    (tmp_path / evaluation.RESULTS).write_text('{"unit": "a", "record": {"text": "one\u2028line"}}\n{"unit": "b", "rec')
    monkeypatch.setattr(Path, "write_text", None)
    assert evaluation.read_results(tmp_path) == {"a": {"text": "one\u2028line"}}
    assert (tmp_path / evaluation.RESULTS).read_bytes().endswith(b"}}\n")


@pytest.mark.parametrize("command", ["train", "compare", "eval", "inspect", "adapt", "demo"])
@pytest.mark.parametrize("place", ["read-only", "file"])
def test_an_unwritable_place_is_refused_before_the_work(command, place, small_files, tmp_path, monkeypatch):
    if place == "file":
        (tmp_path / "place").write_text("")
    else:
        (tmp_path / "place").mkdir()
        # permissions do not bind root
        monkeypatch.setattr(files.os, "access", lambda path, mode: Path(path).name != "place")
    monkeypatch.setattr(torch.nn.Module, "__call__", None)
    code, said = invoke(words_of(command, small_files, tmp_path / "place" / "out"), monkeypatch)
    assert code == 2
    assert ("is a file; choose a directory" if place == "file" else "is read-only; choose another") in said
    assert place == "file" or list((tmp_path / "place").iterdir()) == []


@pytest.mark.parametrize("command", ["train", "compare", "eval", "inspect", "adapt"])
@pytest.mark.usefixtures("no_drawing")
def test_brackets_in_the_name_of_a_folder_are_no_markup(command, small_files, tmp_path, monkeypatch):
    monkeypatch.setenv("EQUITAPE_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "out[/red]"
    code, said = invoke(words_of(command, small_files, out), monkeypatch)
    assert code == 0, said
    # lines may break anywhere in a long name
    assert "out[/red]" in "".join(said.split())
    assert any(out.iterdir())


def test_the_command_that_scores_answers_is_quoted_for_the_shell(small_files, tmp_path, monkeypatch):
    monkeypatch.setenv("EQUITAPE_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "my [/answers]"
    code, said = invoke([*words_of("eval", small_files, out), "--no-score"], monkeypatch)
    assert code == 0, said
    assert f"score them with: equitape eval {shlex.quote(str(out))} --rescore" in said
