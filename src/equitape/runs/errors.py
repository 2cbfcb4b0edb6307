"""Errors as one line, and detection of out-of-memory errors."""

import shlex
import sys

import torch

OUT_OF_MEMORY_PHRASES = ("CUDA out of memory", "CUDA error: out of memory", "can't allocate memory")


def first_line(error: BaseException) -> str:
    """The first line of an error's message without the full stop, or its class name if it has no message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".: ")


def named_line(error: BaseException) -> str:
    """The class of an error and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(": ")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error or one of its causes is an out-of-memory error."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, torch.OutOfMemoryError | MemoryError):
            return True
        # compilers wrap the error in their own class; torch has no class for out of memory at process start
        if any(phrase in str(found) for phrase in OUT_OF_MEMORY_PHRASES):
            return True
        found = found.__cause__ or found.__context__
    return False


def command_to_continue(*, resume: bool) -> str:
    """The command line of this process, plus --resume if the command needs it to continue."""
    words = ["equitape", *sys.argv[1:]]
    if resume and "--resume" not in words:
        words.append("--resume")
    return shlex.join(words)


def describe_interrupt(kept: str, *, resume: bool) -> str:
    """The message as one line. kept: a sentence that says what is kept."""
    return f"Interrupted. {kept} Continue with: {command_to_continue(resume=resume)}"
