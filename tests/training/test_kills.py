"""A kill before any file operation of `train` and `compare` loses nothing: the resumed run is bit for bit the same.

Every operation that changes a file is counted in a forked process. Before the k-th, the folder is copied as `kill -9`
would leave it there: with what was written, without what is still in the process. The suite resumes a sample of these
copies; EQUITAPE_EVERY_KILL=1 resumes all of them.
"""

import json
import multiprocessing
import os
import shutil
import socket
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from small_recipe import SMALL

from equitape.runs.lock import locked
from equitape.training import compare as comparison
from equitape.training.checked import check_recipe
from equitape.training.compare import compare
from equitape.training.recipe import parse_recipe
from equitape.training.run import execute

EVERY = os.environ.get("EQUITAPE_EVERY_KILL") == "1"
SAMPLE = 12
CHANGING = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.truncate", "shutil.rmtree")
"""Events of Python's audit hook; os.replace is os.rename and os.unlink os.remove there."""
CLOCK = ("seconds", "tokens_per_second", "peak_mib", "evaluate_seconds", "date", "environment")


class Watch:
    """Counts operations that change files under a folder, and copies the folder before each of them."""

    def __init__(self, folder: Path, copies: Path):
        self.folder, self.copies, self.count, self.copying = str(folder), copies, 0, False

    def __call__(self, event: str, arguments: tuple) -> None:
        writes = event == "open" and isinstance(arguments[1], str | None) and self.is_writing(arguments)
        if self.copying or not (writes or event in CHANGING) or not str(arguments[0]).startswith(self.folder):
            return
        self.count += 1
        self.copying = True
        (self.copies / str(self.count)).mkdir(parents=True)
        if Path(self.folder).exists():
            shutil.copytree(self.folder, self.copies / str(self.count) / "out", symlinks=True)
        self.copying = False

    @staticmethod
    def is_writing(arguments: tuple) -> bool:
        return bool(arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


def checked():
    train = {"steps": 3, "batch_size": 2, "save_steps": 1, "logging_steps": 1, "save_total_limit": 1}
    return check_recipe(
        parse_recipe({**SMALL, "name": "small", "seeds": [0], "encodings": ["rope", "nope"], "train": train})
    )


def train(out: Path) -> None:
    execute(checked(), "rope", 0, out, resume=True)


def run_compare(out: Path) -> None:
    comparison.write_report = lambda results, out: None
    compare(checked(), out)


COMMANDS = {"train": train, "compare": run_compare}


def work(command: str, out: Path, copies: Path | None) -> None:
    torch.set_num_threads(1)
    if copies is not None:
        sys.addaudithook(Watch(out, copies))
    COMMANDS[command](out)


def in_process(command: str, out: Path, copies: Path | None = None) -> int | None:
    process = multiprocessing.get_context("fork").Process(target=work, args=(command, out, copies))
    process.start()
    process.join()
    return process.exitcode


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """(folder of an uninterrupted run of a command, folder of copies: N/out is what a kill before operation N leaves)."""

    @cache
    def make(command):
        home = tmp_path_factory.mktemp(command)
        assert in_process(command, home / "run" / "out", home / "copies") == 0
        return home / "run" / "out", home / "copies"

    return make


def content(folder: Path) -> dict:
    """Every file of a run, without clocks and what depends on them."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_dir() or "tensorboard" in name:
            continue
        found[name] = path.read_bytes()
        if path.suffix == ".json" and "model" not in path.parts:
            found[name] = without_clock(json.loads(found[name]))
        elif path.name == "training_args.bin":
            # holds the folder's name
            found[name] = None
    return found


def without_clock(value):
    if isinstance(value, dict):
        return {key: without_clock(each) for key, each in value.items() if key not in CLOCK}
    return [without_clock(each) for each in value] if isinstance(value, list) else value


def points(count: int) -> list[int]:
    if EVERY:
        return list(range(1, count + 1))
    return sorted({1 + index * (count - 1) // (SAMPLE - 1) for index in range(SAMPLE)})


def count_of(copies: Path) -> int:
    return len(list(copies.iterdir()))


@pytest.mark.parametrize("command", COMMANDS)
def test_killed_before_a_file_operation(command, whole, tmp_path):
    folder, copies = whole(command)
    expected = content(folder)
    count = count_of(copies)
    assert count > 60
    lost = []
    for at in points(count):
        shutil.copytree(copies / str(at), tmp_path / str(at))
        out = tmp_path / str(at) / "out"
        code = in_process(command, out)
        found = content(out)
        if code != 0 or found != expected:
            differing = [name for name in {**found, **expected} if found.get(name) != expected.get(name)]
            lost.append(f"killed before operation {at}: exit code {code}, differing: {differing}")
    assert lost == []


def test_finished_training_is_never_done_again(whole):
    """A kill after the last step: what is left is scored and written, and no step is trained twice."""
    copies = whole("train")[1]
    count = count_of(copies)
    unfinished = [copies / str(at) / "out" for at in range(count - 14, count + 1)]
    unfinished = [out for out in unfinished if not (out / "run.json").exists()]
    assert unfinished
    for out in unfinished:
        steps = [json.loads(line)["step"] for line in (out / "log.jsonl").read_text().splitlines()]
        assert steps == [1, 2, 3]
        assert (out / "checkpoints" / "checkpoint-3" / "manifest.json").exists()


def test_a_second_process_in_the_same_folder_is_refused(tmp_path):
    for run in (lambda: execute(checked(), "rope", 0, tmp_path / "run"), lambda: compare(checked(), tmp_path / "run")):
        with locked(tmp_path / "run"), pytest.raises(ValueError, match=f"Process {os.getpid()} on .* is working in"):
            run()
        assert list((tmp_path / "run").iterdir()) == []


def test_remains_of_a_kill_after_the_last_step_are_removed(whole, tmp_path):
    """run.json is there, so nothing is left to train: only the lock and the checkpoints of the dead process go."""
    out = Path(shutil.copytree(whole("compare")[0], tmp_path / "out"))
    folder = out / "runs" / "rope-seed0"
    (folder / ".lock").write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "started": "1"}))
    (folder / "checkpoints" / "checkpoint-3").mkdir(parents=True)
    assert in_process("compare", out) == 0
    assert content(out) == content(whole("compare")[0])
