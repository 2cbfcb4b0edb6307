"""equitape demo."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def demo(
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps. Default: the recipe's.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of weights and sums. Default: the recipe's.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of results and report. Default: runs/demo.")] = None,
) -> None:
    """Train a few encodings on small additions, compare them and answer a few sums; minutes on two CPU cores.

    This is `equitape compare demo`: runs that finished before are not repeated.
    """
    from ..demo import run_demo

    overrides = {"train.steps": steps, "seeds": None if seed is None else f"[{seed}]"}
    changed = {key: value for key, value in overrides.items() if value is not None}
    suffix = "".join(
        f"-{key.split('.')[-1]}{value}".replace("[", "").replace("]", "") for key, value in changed.items()
    )
    try:
        run_demo([f"{key}={value}" for key, value in changed.items()], out or Path(f"runs/demo{suffix}"), Console())
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
