"""equitape encodings."""

from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table


def encodings(
    json: Annotated[bool, typer.Option("--json", help="Print JSON for programs to read.")] = False,
) -> None:
    """List the encodings and their options."""
    from json import dumps

    from ..encodings import ENCODINGS
    from ..settings import describe_settings

    rows = {kind: describe_settings(ENCODINGS[kind].options_class) for kind in ENCODINGS}
    if json:
        typer.echo(dumps(rows, indent=2))
        return
    table = Table()
    for column in ("encoding", "idea", "options and defaults"):
        table.add_column(column, overflow="fold")
    for kind, options in rows.items():
        # of nested options only the first, their kind: the rest is in the documentation
        shown = {
            name: next(iter(value.values())) if isinstance(value, dict) else value for name, value in options.items()
        }
        table.add_row(kind, escape(ENCODINGS[kind].idea), ", ".join(f"{name}={value}" for name, value in shown.items()))
    console = Console()
    console.print(table)
    console.print("Every encoding has a page in docs/reference/encodings; --json prints nested options in full.")
