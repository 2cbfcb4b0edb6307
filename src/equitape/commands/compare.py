"""equitape compare."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .options import keeping
from .train import DryRun, Overrides, RecipeName, Small, read_checked


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
    from ..runs.folders import file_name
    from ..runs.progress import Progress
    from ..training import compare as comparison
    from ..training.recipe import load_recipe
    from ..training.show import show_results
    from ..training.small import NOTE

    loaded = load_recipe(recipe, overrides or [], small=small)
    out = out or Path("runs") / file_name(loaded.name)
    comparison.check_directory(out, loaded)
    progress = Progress(Console(stderr=True))
    checked = read_checked(loaded, out, progress, dry_run)
    if checked is None:
        return
    with keeping(lambda: comparison.describe_kept(checked, out), resume=False):
        results = comparison.compare(checked, out, jobs=jobs, console=progress.console)
        write_report(results, out)
    show_results(results, Console())
    if small:
        typer.echo(NOTE)
    typer.echo(f"Wrote the report to {out / 'report.html'}.")
    if not all(run.done for run in results.runs):
        raise typer.Exit(1)
