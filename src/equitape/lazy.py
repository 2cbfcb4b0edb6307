"""Lazy imports of public names (PEP 562), so that commands start quickly."""

from collections.abc import Callable
from importlib import import_module
from typing import Any


def lazy_names(package: str, places: dict[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package. places: from public names to the modules that define them."""

    def get(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(places[name]), name)

    return get
