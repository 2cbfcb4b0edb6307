"""equitape demo."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from .options import keeping


def demo(
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps. Default: the recipe's.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of weights and data. Default: the recipe's.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of results and report. Default: runs/demo.")] = None,
) -> None:
    """Train tape2 and RoPE on short pieces of novels and score them on longer ones. Takes minutes on two CPU cores.

    This is `equitape compare demo`: finished runs are not repeated.
    """
    from ..report import write_report
    from ..training.checked import check_recipe
    from ..training.compare import compare, describe_kept
    from ..training.recipe import load_recipe
    from ..training.show import results_table

    overrides = {"train.steps": steps, "seeds": None if seed is None else f"[{seed}]"}
    changed = {key: value for key, value in overrides.items() if value is not None}
    suffix = "".join(
        f"-{key.split('.')[-1]}{value}".replace("[", "").replace("]", "") for key, value in changed.items()
    )
    out = out or Path(f"runs/demo{suffix}")
    console = Console()
    checked = check_recipe(load_recipe("demo", [f"{key}={value}" for key, value in changed.items()]))
    console.print(escape(checked.recipe.description))
    with keeping(lambda: describe_kept(checked, out), resume=False):
        # models this small train faster on one thread than on two
        results = compare(checked, out, jobs=2, console=console)
        write_report(results, out)
    found = [name for run in results.runs if run.evaluation for name in run.evaluation.metrics]
    console.print(results_table(results, [name for name in dict.fromkeys(found) if name.startswith("bits_per_byte")]))
    console.print(
        "Bits per byte at multiples of the trained length; lower is better. A loss that grows with the length means "
        "that the model cannot read longer text than it was trained on. The learned decay prevents that, in tape2 as "
        "in RoPE, and rotated values lower the loss of both. A model of this size hardly shows what TAPE's field adds: "
        "see REPRODUCTION.md, Beyond the paper.\n"
        "One seed and one small model: a demonstration, not evidence. For full experiments, run equitape recipes.",
        highlight=False,
    )
