"""Plans as tables, for the terminal and for docs/explanation/scale.md."""

from collections.abc import Sequence

from ..scale.layouts import Layout
from ..scale.planning import Plan
from .numbers import number, quantity

GIB = 2**30


def gibibytes(size: float) -> str:
    """Bytes in GiB."""
    return f"{number(size / GIB, digits=3)} GiB"


def seconds(value: float) -> str:
    """A time with three significant digits."""
    if value < 1:
        return f"{number(1e3 * value, digits=3)} ms"
    for size, unit in ((3600.0, "h"), (60.0, "min")):
        if value >= 2 * size:
            return f"{number(value / size, digits=3)} {unit}"
    return f"{number(value, digits=3)} s"


def describe_layout(layout: Layout) -> str:
    """A layout in a few words."""
    parts = {
        f"context {layout.context_parallel}": layout.context_parallel > 1,
        f"data {layout.rows_at_once}": layout.rows_at_once > 1,
        "FSDP2": layout.sharded,
        "recompute": layout.checkpointing,
    }
    return ", ".join(name for name, holds in parts.items() if holds) or "one GPU"


def plan_cells(plan: Plan) -> dict[str, str]:
    """All figures of a plan, by name."""
    training, serving, memory = plan.training, plan.serving, plan.training.memory
    fewest = "more than 1,048,576" if plan.fewest_gpus is None else number(plan.fewest_gpus)
    return {
        "parameters": quantity(plan.parameters, digits=3),
        "layout": describe_layout(training.layout),
        "weights per GPU": gibibytes(memory.weights),
        "optimizer per GPU": gibibytes(memory.optimizer),
        "gradients per GPU": gibibytes(memory.gradients),
        "gathered weights, keys and values per GPU": gibibytes(memory.gathered),
        "activations per GPU": gibibytes(memory.activations),
        "logits per GPU": gibibytes(memory.logits),
        "peak per GPU": gibibytes(memory.peak) + ("" if training.fits else " (too much)"),
        "fewest GPUs that fit": fewest,
        "operations per GPU and step": quantity(training.operations, "FLOP", digits=3),
        "ring traffic per GPU and step": gibibytes(training.ring_bytes),
        "weights and gradients on the wire": gibibytes(training.gather_bytes),
        "time to compute": seconds(training.compute_seconds),
        "time of the wire": seconds(training.wire_seconds),
        "time of a step": seconds(training.seconds),
        "tokens per second": number(float(training.tokens_per_second), digits=3),
        "cache of one row": gibibytes(serving.cache),
        "GPUs to serve one row": number(serving.gpus),
        "time to read the prompt": seconds(serving.prefill_seconds),
        "time per new token": seconds(serving.token_seconds),
    }


def plan_table(plans: Sequence[Plan]) -> list[list[str]]:
    """One row per figure, one column per plan."""
    cells = [plan_cells(plan) for plan in plans]
    return [[name, *(each[name] for each in cells)] for name in cells[0]]
