"""Named registries: one name, one object; a wrong name is answered with the nearest right one."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from difflib import get_close_matches
from importlib import import_module, util
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")
OWN = "EQUITAPE_IMPORT"
"""Environment variable for commands: files and modules that register something of one's own."""
_imported: set[str] = set()


def describe_choices(given: object, allowed: Iterable[str]) -> str:
    """The tail of an error message: the nearest allowed name, then all of them."""
    names = sorted(allowed)
    near = get_close_matches(str(given), names, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    # a label may hold a comma of its own
    listed = ", ".join(repr(name) if "," in name else name for name in names)
    return f"{hint} Allowed: {listed}."


def find_own() -> list[str]:
    """What the environment variable names; several are separated as in PATH."""
    names = list(filter(None, os.environ.get(OWN, "").split(os.pathsep)))
    for name in names:
        if not _is_file(name) and not _can_be_imported(name):
            raise ValueError(f"{OWN} names {name!r}, which is neither a Python file nor a module that is installed.")
    return names


def import_own() -> None:
    """Import what the environment variable names, each once."""
    for name in find_own():
        if name in _imported:
            continue
        # before it is imported, for it may ask for names itself
        _imported.add(name)
        try:
            if _is_file(name):
                _import_file(Path(name))
            else:
                import_module(name)
        except BaseException:
            _imported.remove(name)
            raise


def _is_file(name: str) -> bool:
    return name.endswith(".py") and Path(name).is_file()


def _can_be_imported(name: str) -> bool:
    try:
        return all(part.isidentifier() for part in name.split(".")) and util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _import_file(path: Path) -> None:
    # under a name of its own: a file may be called random.py
    name = f"{OWN.lower()}_{path.stem}"
    spec = util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = util.module_from_spec(spec)
    spec.loader.exec_module(module)


class Registry(Generic[T]):
    """A mapping from names to objects. Entries given as "module:name" are imported when first asked for."""

    def __init__(self, what: str):
        self.what = what
        self._entries: dict[str, T | str] = {}

    def register(self, name: str, entry: T | str | None = None) -> Callable[[T], T]:
        """Add an entry under a name: directly, or as a decorator when `entry` is left out."""

        def add(value: T | str) -> T | str:
            if name in self._entries:
                raise ValueError(f"{self.what} {name!r} is registered already; choose another name.")
            self._entries[name] = value
            return value

        if entry is not None:
            add(entry)
        return add  # type: ignore[return-value]

    def unregister(self, name: str) -> None:
        """Take an entry out again (for tests and notebooks that define an encoding twice)."""
        del self._entries[name]

    def __getitem__(self, name: str) -> T:
        if name not in self:
            choices = describe_choices(name, self._entries)
            raise ValueError(f"Unknown {self.what} {name!r}.{choices} One of your own: name its file in {OWN}.")
        entry = self._entries[name]
        if isinstance(entry, str):
            module, _, attribute = entry.partition(":")
            entry = self._entries[name] = getattr(import_module(module), attribute)
        return entry

    def __contains__(self, name: object) -> bool:
        if name not in self._entries:
            import_own()
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        import_own()
        return iter(sorted(self._entries))

    def __len__(self) -> int:
        return len(self._entries)
