"""equitape recipes."""

from typing import Annotated

import typer
from rich.console import Console

from .options import table_of


def recipes(
    action: Annotated[
        str | None, typer.Argument(metavar="[show]", help="'show' prints a recipe.", show_default=False)
    ] = None,
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="The recipe to show.", show_default=False)
    ] = None,
) -> None:
    """List the recipes that come with equitape, or print one with `equitape recipes show NAME`."""
    from ..training.recipe import available_recipes, find_recipe
    from ..values import parse_yaml

    if action is None:
        contents = {name: parse_yaml(find_recipe(name).read_text(), name) for name in available_recipes()}
        rows = [(name, str(content.get("description", ""))) for name, content in contents.items()]
        console = Console()
        console.print(table_of(("recipe", "what it does"), rows))
        console.print("Print a recipe: equitape recipes show NAME. Run it: equitape compare NAME.", highlight=False)
        return
    if action != "show" or name is None:
        raise ValueError("Use `equitape recipes` to list recipes, or `equitape recipes show NAME` to print one.")
    typer.echo(find_recipe(name).read_text().rstrip())
