"""equitape tasks."""

from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table


def tasks(
    json: Annotated[bool, typer.Option("--json", help="Print JSON for programs to read.")] = False,
) -> None:
    """List the tasks to train on and to evaluate, and their options."""
    from json import dumps

    from .listing import list_tasks

    rows = list_tasks()
    if json:
        typer.echo(dumps(rows, indent=2))
        return
    table = Table()
    # the metric goes under the idea: in its own column, options would have no room in 80 characters
    for column in ("task", "can", "idea and first metric", "options and defaults"):
        table.add_column(column, overflow="fold")
    for name, row in rows.items():
        for described in (row, row.get("evaluation")):
            if described is not None:
                can = row["can"] if row["can"] != "both" else "train" if described is row else "evaluate"
                options = ", ".join(f"{option}={value}" for option, value in described["options"].items())
                idea = f"{escape(described['idea'])}\nmetric: {described['headline']}"
                table.add_row(name, can, idea, escape(options))
    console = Console()
    console.print(table)
    console.print(
        "train: name it in a recipe (docs/reference/tasks). evaluate: equitape eval --task (docs/how-to/evaluation.md)."
    )
