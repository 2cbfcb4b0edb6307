"""equitape plan."""

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ..scale.settings import PlanSettings
from .options import AsJson, OptionsOf, print_json, table_of, takes_settings

if TYPE_CHECKING:
    from ..scale.planning import Plan


@takes_settings
def plan(
    model: Annotated[
        str,
        typer.Argument(
            help="A size (155m, smollm2-135m, 1.1b, 7b, 70b, 405b), a folder, a GGUF file, or a name on the Hub."
        ),
    ],
    given: Annotated[
        dict[str, Any], OptionsOf(cls=PlanSettings, names={"encodings": "encoding"}, required=("length",))
    ],
    json: AsJson = False,
) -> None:
    """Plan training and serving at a length on a number of GPUs: memory, operations, bytes over the wire, time.

    Everything is computed from formulas and the model's configuration; nothing runs, and no weights are read. The exit
    code is 1 if no layout fits into the GPUs.

    In a layout, context N splits every row over N GPUs, data N is N such groups, FSDP2 divides weights, gradients and
    optimizer, and recompute keeps no activations. Formulas: docs/explanation/scale.md.
    """
    from ..scale.planning import make_plans

    plans = make_plans(model, PlanSettings.parse(given, "plan"))
    if json:
        print_json([each.to_dict() for each in plans])
    else:
        show_plans(plans, Console())
    if not all(each.training.fits for each in plans):
        raise typer.Exit(1)


def show_plans(plans: "list[Plan]", console: Console) -> None:
    """One column per encoding."""
    from ..report.scale import plan_table

    first = plans[0]
    gpus = first.training.layout.gpus
    title = f"{first.model}, {first.length:,} tokens, {gpus:,} {first.gpu.upper()}{'s' if gpus > 1 else ''}"
    console.print(table_of(("", *(each.encoding for each in plans)), plan_table(plans), title, numbers=True))
