"""Errors as one line, and detection of full memory and full disks."""

import errno
import shlex
import sys
from collections.abc import Iterator

OUT_OF_MEMORY_PHRASES = ("CUDA out of memory", "CUDA error: out of memory", "can't allocate memory")
DISK_FULL_NUMBERS = (errno.ENOSPC, errno.EDQUOT)
DISK_FULL_PHRASES = (
    "No space left on device",
    "Disk quota exceeded",
    "inline_container.cc",
    "PytorchStreamWriter failed",
)
"""safetensors gives the system's words without the number, torch.save only the place in its own code."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message without the full stop, or its class name if it has no message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".: ")


def named_line(error: BaseException) -> str:
    """The class of an error and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(": ")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error or one of its causes is an out-of-memory error."""
    # compilers wrap the error in their own class; torch has no class for out of memory at process start
    return any(
        # by name: importing torch takes seconds
        isinstance(found, MemoryError)
        or type(found).__name__ == "OutOfMemoryError"
        or any(phrase in str(found) for phrase in OUT_OF_MEMORY_PHRASES)
        for found in _causes(error)
    )


def is_disk_full(error: BaseException) -> bool:
    """Whether an error or one of its causes is a full disk."""
    return any(
        (isinstance(found, OSError) and found.errno in DISK_FULL_NUMBERS)
        or any(phrase in str(found) for phrase in DISK_FULL_PHRASES)
        for found in _causes(error)
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__ or found.__context__


def describe_system_error(error: OSError) -> str:
    """An error of the system as a sentence: what cannot be done with which file, and why."""
    if error.errno is None or error.strerror is None:
        return str(error)
    if error.filename is None:
        return f"{error.strerror}."
    return f"Cannot read or write {str(error.filename)!r} ({error.strerror})."


def command_to_continue(*, resume: bool) -> str:
    """The command line of this process, plus --resume if the command needs it to continue."""
    words = ["equitape", *sys.argv[1:]]
    if resume and "--resume" not in words:
        words.append("--resume")
    return shlex.join(words)


def describe_stop(reason: str, kept: str, *, resume: bool) -> str:
    """Why a command stopped, what is kept, and how to continue, in one line. reason and kept are sentences."""
    return f"{reason} {kept} Continue with: {command_to_continue(resume=resume)}"
