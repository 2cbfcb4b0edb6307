"""Files that are either whole or not there."""

import json
import math
import os
from pathlib import Path
from typing import Any


def make_directory(path: Path) -> None:
    """A directory to write into, or one sentence why there can be none."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"The directory {path} cannot be made: {error.strerror}.") from None
    if not os.access(path, os.W_OK):
        raise ValueError(f"The directory {path} cannot be written to.")


def write_text(path: Path, text: str) -> None:
    """Write aside, then rename: a kill leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.name}.partial")
    aside.write_text(text)
    os.replace(aside, path)


def write_json(path: Path, content: Any) -> None:
    """As `write_text`; a number that is none becomes null, which JSON has."""
    write_text(path, json.dumps(plain(content), indent=1) + "\n")


def plain(content: Any) -> Any:
    """The same content in JSON's own types."""
    if isinstance(content, dict):
        return {str(key): plain(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [plain(value) for value in content]
    if isinstance(content, float) and not math.isfinite(content):
        return None
    return content


def flush_to_disk(path: Path) -> None:
    """Wait until a file, or the list of a folder, is on the disk and would outlive a loss of power."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
