"""equitape demo."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def demo(
    steps: Annotated[int | None, typer.Option(min=1, help="Other than the recipe's training steps.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Other than the recipe's seed of weights and sums.")] = None,
    out: Annotated[Path | None, typer.Option(help="Directory of results and report; runs/demo when left out.")] = None,
) -> None:
    """Train a few encodings on small additions, compare them, answer a few sums. Minutes on two CPU cores.

    It is the recipe `demo` run by `equitape compare`: what was finished before is not done again.
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
