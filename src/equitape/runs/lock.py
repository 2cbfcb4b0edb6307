"""A lock per run folder: a second process is refused and sees which process holds it."""

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from .files import make_directory, read_json, write_text

LOCK = ".lock"


class LockedError(ValueError):
    """Another process holds the lock of a folder."""


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Lock a folder against other processes; create it if necessary.

    A lock is taken over if its process has died on this machine.
    """
    make_directory(directory)
    path = directory / LOCK
    _acquire(path)
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()


def _acquire(path: Path) -> None:
    mine = path.with_name(f"{LOCK}.{socket.gethostname()}.{os.getpid()}.partial")
    write_text(mine, json.dumps(_describe_process(os.getpid())))
    try:
        while True:
            try:
                # linking is atomic: it appears with its content, or fails because another process was first
                os.link(mine, path)
                return
            except FileExistsError:
                owner = read_json(path)
                if isinstance(owner, dict) and _has_died(owner):
                    _remove_stale(path, owner)
                elif path.exists():
                    raise LockedError(_refusal(path, owner)) from None
    finally:
        mine.unlink(missing_ok=True)


def _remove_stale(path: Path, owner: dict[str, Any]) -> None:
    """Remove the lock of a dead process, unless another process has replaced it."""
    with _alone_on_this_machine(path.parent):
        if read_json(path) == owner:
            path.unlink(missing_ok=True)


@contextmanager
def _alone_on_this_machine(directory: Path) -> Iterator[None]:
    """Make other processes on this machine wait; those on other machines take over no lock. A kill ends the wait."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        # some network file systems cannot lock a folder
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _describe_process(pid: int) -> dict[str, Any]:
    return {"pid": pid, "host": socket.gethostname(), "started": _start_time(pid)}


def _has_died(owner: dict[str, Any]) -> bool:
    if owner.get("host") != socket.gethostname() or not isinstance(owner.get("pid"), int):
        return False
    try:
        os.kill(owner["pid"], 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    # the process id may have been reused
    return owner.get("started") != _start_time(owner["pid"])


def _start_time(pid: int) -> str | None:
    """Start time of a process in clock ticks; None if the system does not report it."""
    try:
        # the second field, the name in parentheses, may contain spaces
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None


def _refusal(path: Path, owner: Any) -> str:
    if not isinstance(owner, dict):
        return f"{path.parent} is locked by an unreadable {path}. If no process uses this folder, delete the lock."
    return (
        f"Process {owner.get('pid')} on {owner.get('host')} is working in {path.parent}. Wait for it to end, or choose "
        f"another directory. If it is no longer running, delete {path}."
    )
