"""Atomic checkpoints: written to a temporary folder, listed with checksums, then renamed. A kill cannot damage them.

A run directory holds

    saving/                    the checkpoint being written; never read, and removed when a run starts
    checkpoints/checkpoint-N/  complete checkpoints, each with a manifest of its files
"""

import json
import shutil
import zlib
from pathlib import Path
from types import NoneType
from typing import Any

from ..runs.files import publish_folder

SAVING = "saving"
CHECKPOINTS = "checkpoints"
MANIFEST = "manifest.json"
STATE = "trainer_state.json"
"""A file that every checkpoint of Trainer has."""


def publish(partial: Path, run_dir: Path, progress: dict[str, Any], keep: int) -> Path:
    """Move a written checkpoint to `checkpoints/`, then remove all but the newest `keep` checkpoints.

    progress: what the run stores in addition to Trainer's state; `read_progress` returns it.
    """
    files = sorted(path for path in partial.rglob("*") if path.is_file())
    listed = {str(path.relative_to(partial)): [path.stat().st_size, _checksum(path)] for path in files}
    (partial / MANIFEST).write_text(json.dumps({"progress": progress, "files": listed}))
    target = run_dir / CHECKPOINTS / partial.name
    target.parent.mkdir(exist_ok=True)
    if target.exists():
        # a damaged one: the run resumed from an older checkpoint and has reached this step again
        remove(target)
    publish_folder(partial, target)
    for old in _by_step(run_dir)[:-keep]:
        remove(old)
    return target


def newest(run_dir: Path) -> Path | None:
    """The newest complete checkpoint, or None."""
    return next((path for path in reversed(_by_step(run_dir)) if is_complete(path)), None)


def damaged(run_dir: Path) -> list[Path]:
    """Damaged checkpoints newer than the newest complete one."""
    found = []
    for path in reversed(_by_step(run_dir)):
        if is_complete(path):
            break
        found.append(path)
    return found


def is_complete(checkpoint: Path) -> bool:
    """Whether every file of a checkpoint exists with its size and checksum."""
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text())
        listed, progress = manifest["files"], manifest["progress"]
        if STATE not in listed or not all(isinstance(value, (int, float, NoneType)) for value in progress.values()):
            return False
        return all(
            (checkpoint / name).stat().st_size == size and _checksum(checkpoint / name) == checksum
            for name, (size, checksum) in listed.items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False


def step_of(checkpoint: Path) -> int:
    """The step of a checkpoint."""
    return int(checkpoint.name.rpartition("-")[2])


def read_progress(checkpoint: Path) -> dict[str, Any]:
    """The progress stored by `publish`."""
    return json.loads((checkpoint / MANIFEST).read_text())["progress"]


def remove(checkpoint: Path) -> None:
    """Delete a checkpoint, its manifest first, so that a kill does not leave one that looks complete."""
    (checkpoint / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(checkpoint, ignore_errors=True)


def discard(run_dir: Path) -> None:
    """Delete all checkpoints of a finished run, and incomplete ones."""
    for checkpoint in _by_step(run_dir):
        remove(checkpoint)
    for folder in (CHECKPOINTS, SAVING):
        shutil.rmtree(run_dir / folder, ignore_errors=True)


def _by_step(run_dir: Path) -> list[Path]:
    return sorted((run_dir / CHECKPOINTS).glob("checkpoint-[0-9]*"), key=step_of)


def _checksum(path: Path) -> int:
    total = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            total = zlib.crc32(block, total)
    return total
