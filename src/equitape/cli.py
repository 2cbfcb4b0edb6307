"""The command line: one typer app; every command has its file in commands/."""

import typer

from .commands.adapt import adapt
from .commands.bench import bench
from .commands.check import check
from .commands.compare import compare
from .commands.data import data
from .commands.demo import demo
from .commands.encodings import encodings
from .commands.evaluate import evaluate
from .commands.inspect import inspect
from .commands.report import report
from .commands.tasks import tasks
from .commands.train import train
from .registry import find_own

app = typer.Typer(
    name="equitape",
    help="Positional encodings that adapt to content (TAPE), and the encodings they are compared with.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


@app.callback()
def main() -> None:
    """Positional encodings that adapt to content (TAPE), and the encodings they are compared with."""
    try:
        find_own()
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


for command in (encodings, tasks, data, demo, bench, train, compare, report, adapt, inspect, check):
    app.command()(command)
app.command("eval")(evaluate)
