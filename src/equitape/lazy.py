"""Packages whose public names are imported on first use (PEP 562), so that commands start quickly."""

from collections.abc import Callable
from importlib import import_module
from typing import Any


def lazy_names(package: str, places: dict[str, str]) -> Callable[[str], Any]:
    """A package's `__getattr__`. places: from public names to the modules that define them."""

    def get(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(places[name]), name)

    return get
