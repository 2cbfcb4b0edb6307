"""equitape tasks."""

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table


def tasks(
    json: Annotated[bool, typer.Option("--json", help="Print JSON for programs to read.")] = False,
) -> None:
    """List the tasks that models are trained and compared on, and their options."""
    from json import dumps

    from ..settings import describe_settings
    from ..tasks import TASKS

    rows: dict[str, dict[str, Any]] = {
        name: {
            "idea": TASKS[name].idea,
            "headline": TASKS[name].headline,
            "higher_is_better": TASKS[name].higher_is_better,
            "options": describe_settings(TASKS[name].options_class),
        }
        for name in TASKS
    }
    if json:
        typer.echo(dumps(rows, indent=2))
        return
    table = Table()
    # the metric under the idea: in a column of its own, options would have no room for their names in 80 characters
    for column in ("task", "idea and first metric", "options and defaults"):
        table.add_column(column, overflow="fold")
    for name, row in rows.items():
        options = ", ".join(f"{option}={value}" for option, value in row["options"].items())
        table.add_row(name, f"{escape(row['idea'])}\nmetric: {row['headline']}", escape(options))
    console = Console()
    console.print(table)
    console.print("Every task has a page in docs/reference/tasks.")
