"""Commands that share a machine: each runs once, failures twice, and what was interrupted begins again."""

import json
import runpy
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "side_by_side.py"


def run(monkeypatch, out, lines, minutes, at_once=2):
    (out.parent / "commands.txt").write_text("\n".join(lines))
    words = [str(SCRIPT), str(out.parent / "commands.txt"), "--out", str(out)]
    words += ["--minutes", str(minutes), "--at-once", str(at_once), "--gap", "0"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return end.value.code, {entry["line"]: entry for entry in json.loads((out / "status.json").read_text())}


def test_commands_run_until_they_are_done(monkeypatch, tmp_path):
    note = tmp_path / "note"
    well, badly = f"echo well >> {note}", f"echo badly >> {note}; exit 3"
    code, found = run(monkeypatch, tmp_path / "out", ["# a comment", "", well, badly], minutes=1)
    assert code == 1
    assert [(found[line]["tries"], found[line]["code"]) for line in (well, badly)] == [(1, 0), (2, 3)]
    assert sorted(note.read_text().split()) == ["badly", "badly", "well"]
    # again, with one line more: only that one runs
    code, found = run(monkeypatch, tmp_path / "out", [well, f"echo more >> {note}"], minutes=1)
    assert len(found) == 3
    assert sorted(note.read_text().split()) == ["badly", "badly", "more", "well"]


def test_commands_end_with_the_queue(tmp_path):
    (tmp_path / "commands.txt").write_text(f"sleep 5; touch {tmp_path / 'late'}")
    words = [sys.executable, str(SCRIPT), str(tmp_path / "commands.txt"), "--out", str(tmp_path / "out")]
    queue = subprocess.Popen(words)
    while not (tmp_path / "out" / "000.log").exists():
        time.sleep(0.05)
    queue.terminate()
    queue.wait()
    (entry,) = json.loads((tmp_path / "out" / "status.json").read_text())
    assert (entry["tries"], entry["code"]) == (0, None)
    time.sleep(max(0.0, 5.5 - entry["seconds"]))
    assert not (tmp_path / "late").exists()


def test_what_was_interrupted_begins_again(monkeypatch, tmp_path):
    note = tmp_path / "note"
    # the first time it waits in a child process, which must end with it
    line = f"if [ -e {note} ]; then echo again; else touch {note}; sleep 600; touch {note}.late; fi"
    code, found = run(monkeypatch, tmp_path / "out", [line], minutes=1 / 60)
    assert (code, found[line]["tries"], found[line]["code"]) == (1, 0, None)
    code, found = run(monkeypatch, tmp_path / "out", [line], minutes=1)
    assert (code, found[line]["tries"], found[line]["code"]) == (0, 1, 0)
    assert (tmp_path / "out" / "000.log").read_text() == "again\n"
