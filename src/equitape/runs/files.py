"""Atomic writing: a file or folder is either complete or absent, even after a kill.

Everything is written next to its target under a temporary name, `.*.partial`, then renamed. Readers ignore such
names; `remove_partial` deletes those that a killed process left.
"""

import json
import math
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

PARTIAL = ".partial"


def plain(content: Any) -> Any:
    """The same content in JSON types; NaN and infinity become null."""
    if isinstance(content, dict):
        return {str(key): plain(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [plain(value) for value in content]
    if isinstance(content, float) and not math.isfinite(content):
        return None
    return content


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file atomically: a kill leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = _aside(path)
    try:
        aside.write_bytes(content)
        os.replace(aside, path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text atomically."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path, content: Any) -> None:
    """Write JSON atomically. NaN and infinity become null."""
    write_text(path, json.dumps(plain(content), indent=1) + "\n")


def read_json(path: Path) -> Any:
    """Read JSON; None if the file is missing or damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A temporary folder that becomes `target` when the block ends, or is deleted on an error.

    If another process created `target` meanwhile, that folder is kept: both have the same content.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = _aside(target)
    try:
        aside.mkdir()
        yield aside
        try:
            publish_folder(aside, target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def files_in(directory: Path | str) -> Iterator[Path]:
    """A temporary folder whose files move to `directory` when the block ends, .json files last.

    An error in the block leaves `directory` unchanged.
    """
    target = Path(directory).expanduser()
    if target.is_file():
        raise ValueError(f"{str(directory)!r} is a file; give the path of a folder.")
    aside = _aside(target)
    try:
        aside.mkdir(parents=True)
        yield aside
        files = sorted(aside.iterdir(), key=lambda file: (file.suffix == ".json", file.name))
        for file in files:
            flush_to_disk(file)
        target.mkdir(exist_ok=True)
        for file in files:
            os.replace(file, target / file.name)
        flush_to_disk(target)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise OSError(f"Cannot write to {str(directory)!r} ({reason}); nothing there was changed.") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def publish_folder(source: Path, target: Path) -> None:
    """Sync a complete folder to disk, then rename it to its target."""
    for path in source.rglob("*"):
        if path.is_file():
            flush_to_disk(path)
    os.replace(source, target)
    flush_to_disk(target.parent)


def flush_to_disk(path: Path) -> None:
    """Sync a file, or the entries of a folder, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_directory(path: Path) -> None:
    """Create a writable directory; raise ValueError with one sentence if that fails."""
    check_writable(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"Cannot create the directory {path} ({error.strerror}).") from None


def check_writable(directory: Path) -> None:
    """Raise ValueError if a directory cannot be created or written to. Creates nothing."""
    absolute = directory.expanduser().absolute()
    existing = next(path for path in (absolute, *absolute.parents) if path.exists())
    if not existing.is_dir():
        raise ValueError(f"{directory if existing == absolute else existing} is a file; choose a directory.")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ValueError(f"Cannot write to {directory}: {existing} is read-only; choose another directory.")


def is_partial(path: Path) -> bool:
    """Whether this file or folder is an incomplete one left by a killed process."""
    return path.name.endswith(PARTIAL)


def remove_partial(directory: Path) -> None:
    """Delete incomplete files and folders that killed processes left in a directory."""
    for path in list(directory.iterdir()) if directory.is_dir() else []:
        if is_partial(path):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}{PARTIAL}")
