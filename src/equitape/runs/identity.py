"""Whether a folder holds the run that is about to start: equal settings, except those that do not affect results."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .files import check_writable, is_partial
from .lock import LOCK

MOST_CHARACTERS = 100
"""Longer values are cut in messages."""
MOST_DIFFERENCES = 4
"""More are counted in messages."""


@dataclass(frozen=True)
class Difference:
    """A setting whose value differs."""

    name: str
    """Dotted name, such as train.steps."""
    was: Any
    now: Any

    def __str__(self) -> str:
        return "; ".join(f"{each.name} was {shorten(each.was)}, now {shorten(each.now)}" for each in self.parts())

    def parts(self) -> list["Difference"]:
        """What differs within lists of as many dictionaries, such as encodings; else this difference alone."""
        lists = self.was, self.now
        if not all(isinstance(each, list) and all(isinstance(entry, dict) for entry in each) for each in lists):
            return [self]
        was, now = ({str(index): entry for index, entry in enumerate(each)} for each in lists)
        found = find_differences(was, now, inside=f"{self.name}.") if len(was) == len(now) else []
        # an entry of a list that sets None may mean something else than one that sets nothing
        return found or [self]


def shorten(value: Any) -> str:
    """A value in a message: its beginning if it is long."""
    text = str(value)
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]} ..."


def find_differences(
    old: dict[str, Any], new: dict[str, Any], ignored: Iterable[str] = (), inside: str = ""
) -> list[Difference]:
    """Differences between two nested dictionaries of settings. A missing setting equals None.

    ignored: dotted names of settings or groups that do not affect results. inside: dotted name of these dictionaries.
    """
    skipped = set(ignored)
    found = []
    for key in {**old, **new}:
        name, was, now = f"{inside}{key}", old.get(key), new.get(key)
        if name in skipped or was == now:
            continue
        if isinstance(was, dict) and isinstance(now, dict):
            found += find_differences(was, now, skipped, f"{name}.")
        else:
            found.append(Difference(name, was, now))
    return found


def holds_nothing(directory: Path) -> bool:
    """Whether a folder is absent or empty, ignoring a lock and incomplete files."""
    return not directory.exists() or all(path.name == LOCK or is_partial(path) for path in directory.iterdir())


def check_folder(
    directory: Path, kind: str, marker: str, compare: Callable[[], list[Difference]], *, resume: bool
) -> None:
    """Raise ValueError unless the folder can take this run: it must be empty, or hold the same run with `resume`.

    kind: what it should hold, such as "run". marker: the file that identifies such a folder. compare: returns the
    differences between the stored and the new run.
    """
    check_writable(directory)
    if holds_nothing(directory):
        return
    if not (directory / marker).exists():
        raise ValueError(f"{directory} is not empty and has no {kind} to continue; choose another directory.")
    differences = compare()
    if differences:
        parts = [part for each in differences for part in each.parts()]
        left_out = f"; and {len(parts) - MOST_DIFFERENCES} more" if len(parts) > MOST_DIFFERENCES else ""
        listed = "; ".join(map(str, parts[:MOST_DIFFERENCES])) + left_out
        raise ValueError(
            f"{directory} already holds a different {kind} ({listed}). Use its settings, or choose another directory."
        )
    if not resume:
        raise ValueError(
            f"{directory} already holds this {kind}; continue it with --resume, or choose another directory."
        )
