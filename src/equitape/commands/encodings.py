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

    from .listing import list_encodings

    rows = list_encodings()
    if json:
        typer.echo(dumps({kind: row["options"] for kind, row in rows.items()}, indent=2))
        return
    table = Table()
    for column in ("encoding", "idea", "options and defaults"):
        table.add_column(column, overflow="fold")
    for kind, row in rows.items():
        # only the first of nested options, their kind: the documentation has the rest
        shown = {
            name: next(iter(value.values())) if isinstance(value, dict) else value
            for name, value in row["options"].items()
        }
        table.add_row(kind, escape(row["idea"]), ", ".join(f"{name}={value}" for name, value in shown.items()))
    console = Console()
    console.print(table)
    console.print("Every encoding has a page in docs/reference/encodings; --json prints nested options in full.")
