"""What Ctrl-C ends with: one line that says what is kept and how to continue."""

import shlex
import sys


def command_to_continue(*, resume: bool) -> str:
    """The command line of this process, with --resume where a command needs it to continue."""
    words = ["equitape", *sys.argv[1:]]
    if resume and "--resume" not in words:
        words.append("--resume")
    return shlex.join(words)


def describe_interrupt(kept: str, *, resume: bool) -> str:
    """One line. kept: a sentence."""
    return f"Interrupted. {kept} Continue with: {command_to_continue(resume=resume)}"
