"""Checkpoints that a kill at any moment cannot damage: written aside, listed with their checksums, then renamed.

A run directory holds

    saving/                    what is being written now; never read, and removed when a run starts
    checkpoints/checkpoint-N/  complete checkpoints, each with a manifest of its files
"""

import json
import shutil
import zlib
from pathlib import Path
from typing import Any

from ..runs.files import publish_folder

SAVING = "saving"
CHECKPOINTS = "checkpoints"
MANIFEST = "manifest.json"


def publish(partial: Path, run_dir: Path, progress: dict[str, Any], keep: int) -> Path:
    """Move a checkpoint that was written aside into its place, then remove all but the newest `keep` checkpoints.

    progress: what the run knows besides the state of Trainer; `read_progress` returns it.
    """
    files = sorted(path for path in partial.rglob("*") if path.is_file())
    listed = {str(path.relative_to(partial)): [path.stat().st_size, _checksum(path)] for path in files}
    (partial / MANIFEST).write_text(json.dumps({"progress": progress, "files": listed}))
    target = run_dir / CHECKPOINTS / partial.name
    target.parent.mkdir(exist_ok=True)
    if target.exists():
        # damaged: a run that resumed from an older checkpoint has reached this step again
        remove(target)
    publish_folder(partial, target)
    for old in _by_step(run_dir)[:-keep]:
        remove(old)
    return target


def newest(run_dir: Path) -> Path | None:
    """The newest complete checkpoint, or None."""
    return next((path for path in reversed(_by_step(run_dir)) if is_complete(path)), None)


def damaged(run_dir: Path) -> list[Path]:
    """Checkpoints newer than the newest complete one, which cannot be used."""
    found = []
    for path in reversed(_by_step(run_dir)):
        if is_complete(path):
            break
        found.append(path)
    return found


def is_complete(checkpoint: Path) -> bool:
    """Whether every file of a checkpoint is there, with its size and checksum."""
    try:
        listed = json.loads((checkpoint / MANIFEST).read_text())["files"]
        return all(
            (checkpoint / name).stat().st_size == size and _checksum(checkpoint / name) == checksum
            for name, (size, checksum) in listed.items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def step_of(checkpoint: Path) -> int:
    """The step after which a checkpoint was written."""
    return int(checkpoint.name.rpartition("-")[2])


def read_progress(checkpoint: Path) -> dict[str, Any]:
    """The progress that `publish` was given."""
    return json.loads((checkpoint / MANIFEST).read_text())["progress"]


def remove(checkpoint: Path) -> None:
    """Delete a checkpoint, its manifest first: what a kill leaves is then not a checkpoint any more."""
    (checkpoint / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(checkpoint, ignore_errors=True)


def discard(run_dir: Path) -> None:
    """Delete all checkpoints of a finished run, and what was being written."""
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
