"""The command line: one typer app. Each command is a file in commands/."""

import os
from collections.abc import Callable
from inspect import cleandoc
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from . import import_names
from .commands.adapt import adapt
from .commands.bench import bench
from .commands.check import check
from .commands.compare import compare
from .commands.data import data
from .commands.demo import demo
from .commands.evaluate import evaluate
from .commands.extend import extend
from .commands.generate import chat, generate
from .commands.inspect import inspect
from .commands.listing import encodings, tasks
from .commands.options import RecipeCommand, in_one_sentence, one_sentence
from .commands.plan import plan
from .commands.recipes import recipes
from .commands.report import report
from .commands.train import train
from .plugins import add_plugins, load_plugins, named_plugins
from .version import __version__


class Commands(TyperGroup):
    """The group of all commands. It rejects arguments that are not valid UTF-8."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for argument in args:
            if any("\ud800" <= character <= "\udfff" for character in argument):
                shown = argument.encode("utf-8", "backslashreplace").decode()
                raise typer.BadParameter(f"The argument {shown!r} is not valid UTF-8; rename the file or retype it.")
        return super().parse_args(ctx, args)


app = typer.Typer(
    name="equitape",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


def show_version(asked: bool) -> None:
    """Print the version and exit, before other options are parsed."""
    if asked:
        typer.echo(f"equitape {__version__}")
        raise typer.Exit


@app.callback()
def main(
    plugins: Annotated[
        list[str] | None,
        typer.Option(
            "--import",
            metavar="FILE_OR_MODULE",
            help="Import a Python file or module that registers encodings or tasks. Repeatable.",
        ),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Positional encodings that adapt to content (TAPE), and the encodings they are compared with."""
    # commands show their own progress; read by tqdm when it is imported
    os.environ.setdefault("TQDM_DISABLE", "1")
    with one_sentence():
        if plugins:
            add_plugins(plugins)
        if named_plugins():
            # plugins can use the public names of equitape
            import_names()
            load_plugins()


def help_of(command: Callable[..., None]) -> str:
    """A command's docstring, a line per paragraph: the help keeps line breaks, in terminals of every width."""
    return "\n\n".join(" ".join(part.split()) for part in cleandoc(command.__doc__ or "").split("\n\n"))


# in the order of the help, and of docs/reference/commands.md
PANELS = {
    "Train and compare encodings": (demo, compare, train, report),
    "Pretrained models": (extend, adapt, generate, chat),
    "Measure and inspect": (evaluate, inspect, check, bench, plan),
    "What there is": (recipes, encodings, tasks, data),
}
for panel, commands in PANELS.items():
    for command in commands:
        app.command(
            "eval" if command is evaluate else None,
            cls=RecipeCommand if command in (compare, train) else None,
            help=help_of(command),
            rich_help_panel=panel,
        )(in_one_sentence(command))
