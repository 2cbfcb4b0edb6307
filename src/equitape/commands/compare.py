"""equitape compare."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..training.help import recipe_help
from .train import DryRun, Overrides, RecipeName, Small


def compare(
    recipe: RecipeName,
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option(help="Directory of results and report; runs/RECIPE when left out.")
    ] = None,
    jobs: Annotated[
        int, typer.Option(min=1, help="Runs side by side, which fills a GPU that a small model leaves idle.")
    ] = 1,
    small: Small = False,
    dry_run: DryRun = False,
) -> None:
    """Train every encoding of a recipe with every seed, score them, and write a report.

    Interrupted, the same command goes on: finished runs are kept, a half one continues from its last checkpoint.
    """
    from ..report import write_report
    from ..training import compare as comparison
    from ..training.files import make_directory
    from ..training.plan import make_plan
    from ..training.recipe import load_recipe
    from ..training.show import show_plan, show_results

    try:
        plan = make_plan(load_recipe(recipe, overrides or [], small=small))
        out = out or Path("runs") / plan.recipe.name
        comparison.check_directory(out, plan)
        if not dry_run:
            make_directory(out)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if dry_run:
        show_plan(plan, Console())
        return
    if plan.data:
        typer.echo(f"Training data: {plan.data}", err=True)
    results = comparison.compare(plan, out, jobs=jobs, console=Console(stderr=True))
    write_report(results, out)
    show_results(results, Console())
    typer.echo(f"The report is {out / 'report.html'}.")
    if any(run["status"] != "done" for run in results["runs"]):
        raise typer.Exit(1)


compare.__doc__ = f"{compare.__doc__}\n\n{recipe_help()}"
