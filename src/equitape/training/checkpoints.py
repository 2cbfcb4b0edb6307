"""Checkpoints that a kill at any moment cannot spoil: written aside, listed with their checksums, then renamed.

A run directory holds

    saving/                    what is being written now; never read, and removed when a run starts
    checkpoints/checkpoint-N/  whole checkpoints, each with a manifest of its files
"""

import json
import os
import shutil
import zlib
from pathlib import Path
from typing import Any

from .files import flush_to_disk

SAVING = "saving"
CHECKPOINTS = "checkpoints"
MANIFEST = "manifest.json"


def publish(partial: Path, run_dir: Path, progress: dict[str, Any], keep: int) -> Path:
    """Rename a folder that was written aside into its place, then remove all but the newest `keep` checkpoints.

    progress: what the run knows of itself beside the state of Trainer; `read_progress` gives it back.
    """
    files = sorted(path for path in partial.rglob("*") if path.is_file())
    listed = {str(path.relative_to(partial)): [path.stat().st_size, _checksum(path)] for path in files}
    (partial / MANIFEST).write_text(json.dumps({"progress": progress, "files": listed}))
    for path in [*files, partial / MANIFEST]:
        flush_to_disk(path)
    target = run_dir / CHECKPOINTS / partial.name
    target.parent.mkdir(exist_ok=True)
    if target.exists():
        # left by a run that found it damaged
        shutil.rmtree(target)
    os.replace(partial, target)
    flush_to_disk(target.parent)
    for old in _by_step(run_dir)[:-keep]:
        remove(old)
    return target


def newest(run_dir: Path) -> Path | None:
    """The newest checkpoint whose files are all as they were written, or None."""
    return next((path for path in reversed(_by_step(run_dir)) if is_whole(path)), None)


def is_whole(checkpoint: Path) -> bool:
    """Whether every file of a checkpoint is there, with its size and checksum."""
    try:
        listed = json.loads((checkpoint / MANIFEST).read_text())["files"]
        return all(
            (checkpoint / name).stat().st_size == size and _checksum(checkpoint / name) == checksum
            for name, (size, checksum) in listed.items()
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def step_of(checkpoint: Path) -> int:
    """The step after which a checkpoint was written."""
    return int(checkpoint.name.rpartition("-")[2])


def read_progress(checkpoint: Path) -> dict[str, Any]:
    """What `publish` was given as progress."""
    return json.loads((checkpoint / MANIFEST).read_text())["progress"]


def remove(checkpoint: Path) -> None:
    """Delete a checkpoint, its manifest first: what is left after a kill is no checkpoint any more."""
    (checkpoint / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(checkpoint, ignore_errors=True)


def discard(run_dir: Path) -> None:
    """Delete all checkpoints of a run that needs none any more."""
    for checkpoint in _by_step(run_dir):
        remove(checkpoint)
    shutil.rmtree(run_dir / CHECKPOINTS, ignore_errors=True)


def _by_step(run_dir: Path) -> list[Path]:
    return sorted((run_dir / CHECKPOINTS).glob("checkpoint-[0-9]*"), key=step_of)


def _checksum(path: Path) -> int:
    total = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            total = zlib.crc32(block, total)
    return total
