"""equitape compare."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .train import DryRun, Overrides, RecipeName, Small


def compare(
    recipe: RecipeName,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Folder of results and report. Default: runs/RECIPE.")] = None,
    jobs: Annotated[
        int, typer.Option(min=1, help="Runs in parallel; use several to fill a GPU with small models.")
    ] = 1,
    small: Small = False,
    dry_run: DryRun = False,
) -> None:
    """Train every encoding of a recipe with every seed, score them, and write a report.

    Run the same command again after an interruption: it keeps finished runs and resumes the others from their last
    checkpoint.
    """
    from ..report import write_report
    from ..runs.errors import describe_interrupt
    from ..runs.files import make_directory
    from ..runs.folders import file_name
    from ..runs.lock import LockedError
    from ..training import compare as comparison
    from ..training.plan import make_plan
    from ..training.recipe import load_recipe
    from ..training.run import check_data
    from ..training.show import show_plan, show_results

    try:
        loaded = load_recipe(recipe, overrides or [], small=small)
        out = out or Path("runs") / file_name(loaded.name)
        comparison.check_directory(out, loaded)
        plan = make_plan(loaded)
        check_data(out, plan.task)
        if not dry_run:
            make_directory(out)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if dry_run:
        show_plan(plan, Console())
        return
    if plan.data:
        typer.echo(f"Training data: {plan.data}", err=True)
    if plan.task.warning:
        typer.echo(f"Warning: {plan.task.warning}", err=True)
    try:
        results = comparison.compare(plan, out, jobs=jobs, console=Console(stderr=True))
    except KeyboardInterrupt:
        typer.echo(describe_interrupt(comparison.describe_kept(plan, out), resume=False), err=True)
        raise typer.Exit(130) from None
    except LockedError as error:
        raise typer.BadParameter(str(error)) from None
    write_report(results, out)
    show_results(results, Console())
    typer.echo(f"Wrote the report to {out / 'report.html'}.")
    if not all(run.done for run in results.runs):
        raise typer.Exit(1)
