"""What a model costs at any size, from formulas: memory, operations, wire and time (docs/explanation/scale.md)."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .planning import Plan

__all__ = ["plan"]


def plan(model: str | Path, length: int, **options: Any) -> "list[Plan]":
    """Plan training and serving of a model at a length: one plan per encoding.

    model: a size (155m, smollm2-135m, 1.1b, 7b, 70b, 405b), or a model that `equitape.adapt` reads: a folder, a GGUF
    file or a name on the Hub, of which only the configuration is read. options: as in `PlanSettings`: gpus, gpu, batch,
    context_parallel, checkpointing, precision, encodings.
    """
    from .planning import make_plans
    from .settings import PlanSettings

    return make_plans(model, PlanSettings.parse({"length": length, **options}, "plan"))
