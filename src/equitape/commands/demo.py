"""equitape demo."""

from typing import Annotated

import typer
from rich.console import Console


def demo(
    steps: Annotated[int, typer.Option(min=1, help="Training steps for each encoding.")] = 1000,
    seed: Annotated[int, typer.Option(help="Seed of weights and sums.")] = 0,
) -> None:
    """Train RoPE and TAPE on small additions, compare them, answer a few sums. Minutes on two CPU cores."""
    from ..demo import DemoSettings, run

    run(DemoSettings(steps=steps, seed=seed), Console())
