"""equitape train."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from .options import keeping

if TYPE_CHECKING:
    from ..runs.progress import Progress
    from ..training.checked import CheckedRecipe
    from ..training.recipe import Recipe

RecipeName = Annotated[str, typer.Argument(help="Name of a built-in recipe, or path of a YAML file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="key=value, for example train.steps=100 or encodings=rope,tape.", show_default=False),
]
Small = Annotated[
    bool,
    typer.Option(
        "--small", help="Reduce the recipe: one seed, a small model, few steps, built-in text; a minute on a CPU."
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check everything and show the plan without training.")]


def read_checked(recipe: "Recipe", out: Path, progress: "Progress", dry_run: bool) -> "CheckedRecipe | None":
    """Read the data of a recipe and print what a user should know about it; None after a dry run, which shows it."""
    from ..training.checked import check_recipe
    from ..training.run import check_data
    from ..training.show import show_checked

    with progress.phase("reading the data"):
        checked = check_recipe(recipe)
    check_data(out, checked.task)
    if dry_run:
        show_checked(checked, Console())
        return None
    for title, text in (("Training data", checked.data), ("Warning", checked.task.warning)):
        if text and not progress.console.quiet:
            typer.echo(f"{title}: {text}", err=True)
    return checked


def train(
    recipe: RecipeName,
    overrides: Overrides = None,
    encoding: Annotated[
        str | None, typer.Option(help="Label of the encoding to train. Default: the recipe's first.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the run. Default: the encoding's first.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run. Default: runs/RECIPE-ENCODING-seedN.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the last checkpoint in --out.")] = False,
    small: Small = False,
    dry_run: DryRun = False,
) -> None:
    """Train one encoding of a recipe with one seed, and score it.

    Add --resume to continue after an interruption.

    On several devices: torchrun -m equitape train ...
    """
    from ..runs.folders import file_name
    from ..runs.progress import Progress
    from ..training.fit import check_processes
    from ..training.recipe import load_recipe
    from ..training.run import (
        RECIPE,
        check_directory,
        describe_kept,
        execute,
        finished,
        folder_name,
        out_of_memory,
        single_run,
    )
    from ..training.show import show_run
    from ..training.small import NOTE

    loaded = load_recipe(recipe, overrides or [], small=small)
    choice = loaded.choose(encoding) if encoding is not None else loaded.choices[0]
    number = choice.seeds[0] if seed is None else seed
    single = single_run(loaded, choice.label, number)
    out = out or Path("runs") / f"{file_name(loaded.name)}-{folder_name(choice.label, number)}"
    check_directory(out, single, resume)
    # set by torchrun and accelerate launch
    check_processes(loaded.train, int(os.environ.get("WORLD_SIZE", "1")))
    # of several processes, only the main one prints
    progress = Progress(Console(stderr=True, quiet=os.environ.get("RANK", "0") != "0"))
    checked = read_checked(single, out, progress, dry_run)
    if checked is None:
        return
    if resume and not (out / RECIPE).exists() and not progress.console.quiet:
        typer.echo(f"No run to resume in {out}; starting from step 0.", err=True)
    already = resume and finished(out) is not None
    with keeping(lambda: describe_kept(out), resume=True, memory=out_of_memory()):
        result = execute(checked, choice.label, number, out, resume=resume, progress=progress)
    if result is None:
        return
    show_run(result, checked.task, Console())
    if small:
        typer.echo(NOTE)
    if not result.done:
        typer.echo(f"Wrote losses to {out}.")
        raise typer.Exit(1)
    typer.echo(f"The run in {out} is already finished." if already else f"Wrote weights, losses and figures to {out}.")
