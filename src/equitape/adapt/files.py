"""Folders that are never half-written: everything goes aside first and is moved into place when it is whole."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from ..training.files import flush_to_disk


@contextmanager
def written_aside(directory: Path | str) -> Iterator[Path]:
    """A folder to write into. Its files are moved to `directory` when the block ends, descriptions (.json) last; if
    anything fails before, it is removed and `directory` is as it was.
    """
    target = Path(directory).expanduser()
    if target.is_file():
        raise ValueError(f"{str(directory)!r} is a file; give the name of a folder.")
    aside = target.parent / f".{target.name}.writing-{os.getpid()}"
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
        raise OSError(f"{str(directory)!r} cannot be written ({reason}); nothing there was changed.") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
