"""Where derived data is kept: one folder for each thing that was made, there whole or not at all."""

import hashlib
import os
from pathlib import Path


def default_cache() -> Path:
    """$EQUITAPE_CACHE, or .cache/equitape in the home directory."""
    return Path(os.environ.get("EQUITAPE_CACHE") or Path.home() / ".cache" / "equitape")


def entry(cache: str | Path | None, kind: str, *parts: str) -> Path:
    """The folder of a thing of some kind that is made from these parts and changes with them."""
    name = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
    return (Path(cache) if cache is not None else default_cache()) / kind / name
