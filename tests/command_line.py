"""The command line as tests use it."""

from functools import cache

from typer import testing
from typer.testing import CliRunner, Result

from equitape.cli import app

# every call would make all commands again
testing._get_command = cache(testing._get_command)


def call(*words: object, code: int | None = 0, **options) -> Result:
    """Run a command in this process. code: its exit code; None: any."""
    result = CliRunner().invoke(app, [str(word) for word in words], **options)
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    assert code in (None, result.exit_code), result.output
    return result


def invoke(*words: object, code: int = 0) -> str:
    """All output of a command in one line."""
    return in_one_line(call(*words, code=code).output)


def in_one_line(output: str) -> str:
    """Output without line breaks, which the box around an error puts anywhere."""
    return " ".join(output.replace("│", " ").split())
