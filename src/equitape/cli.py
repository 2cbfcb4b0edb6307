"""The command line: one typer app, each command a thin call into the library."""

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

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


@app.command()
def encodings(
    json: Annotated[bool, typer.Option("--json", help="Print JSON for programs to read.")] = False,
) -> None:
    """List the encodings and their options."""
    from json import dumps

    from .encodings import ENCODINGS
    from .encodings.options import describe_options

    rows = {kind: describe_options(ENCODINGS[kind].options_class) for kind in ENCODINGS}
    if json:
        typer.echo(dumps(rows, indent=2))
        return
    table = Table("encoding", "what it is", "options and defaults")
    for kind, options in rows.items():
        summary = (ENCODINGS[kind].__doc__ or "").strip().splitlines()[0]
        table.add_row(kind, summary, ", ".join(f"{name}={value}" for name, value in options.items()))
    Console().print(table)


@app.command()
def demo(
    steps: Annotated[int, typer.Option(min=1, help="Training steps for each encoding.")] = 900,
    seed: Annotated[int, typer.Option(help="Seed of weights and sums.")] = 0,
) -> None:
    """Train RoPE and TAPE on small additions, compare them, answer a few sums. Minutes on two CPU cores."""
    from .demo import DemoSettings, run

    run(DemoSettings(steps=steps, seed=seed), Console())
