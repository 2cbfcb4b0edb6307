"""Named registries. An unknown name raises an error that suggests the nearest known one."""

from collections.abc import Callable, Iterable, Iterator
from difflib import get_close_matches
from importlib import import_module
from typing import Generic, TypeVar

from .plugins import VARIABLE, load_plugins

T = TypeVar("T")


def describe_choices(given: object, allowed: Iterable[str]) -> str:
    """The end of an error message: the nearest allowed name, then all allowed names."""
    names = sorted(allowed)
    near = get_close_matches(str(given), names, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    # labels may contain commas
    listed = ", ".join(repr(name) if "," in name else name for name in names)
    return f"{hint} Allowed: {listed}."


def counted(count: int, noun: str) -> str:
    """A count with its noun: "1 run", "1,000 runs"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


class Registry(Generic[T]):
    """A mapping from names to objects. Entries given as "module:name" are imported on first use."""

    def __init__(self, what: str):
        self.what = what
        self._entries: dict[str, T | str] = {}

    def register(self, name: str, entry: T | str | None = None) -> Callable[[T], T]:
        """Add an entry under a name. Without `entry`, returns a decorator."""

        def add(value: T | str) -> T | str:
            if name in self._entries:
                raise ValueError(f"{self.what} {name!r} is already registered; choose another name.")
            self._entries[name] = value
            return value

        if entry is not None:
            add(entry)
        return add  # type: ignore[return-value]

    def unregister(self, name: str) -> None:
        """Remove an entry (for tests, and notebooks that define an encoding twice)."""
        del self._entries[name]

    def __getitem__(self, name: str) -> T:
        if name not in self:
            choices = describe_choices(name, self._entries)
            raise ValueError(f"Unknown {self.what} {name!r}.{choices} To add your own, set {VARIABLE} to its file.")
        entry = self._entries[name]
        if isinstance(entry, str):
            module, _, attribute = entry.partition(":")
            entry = self._entries[name] = getattr(import_module(module), attribute)
        return entry

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str):
            return False
        if name not in self._entries:
            load_plugins()
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        load_plugins()
        return iter(sorted(self._entries))

    def __len__(self) -> int:
        return len(self._entries)
