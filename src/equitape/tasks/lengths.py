"""Tasks whose prompts have one size: which sizes are evaluated, and exact match against them."""

from dataclasses import dataclass
from typing import Any

from ..settings import Positive
from .base import Curve, Evaluation
from .prompts import Cell, PromptOptions, PromptTask, mean_percent


@dataclass(frozen=True, kw_only=True)
class LengthOptions(PromptOptions):
    """Which sizes are evaluated."""

    stride: Positive = 1
    """Evaluate only the sizes stride, 2 stride, 3 stride, ...; 1 evaluates all."""

    # without an annotation, which would make it look like a setting
    unit = ""
    """What sizes count: subclasses have the settings trained_UNIT and tested_UNIT."""

    def __post_init__(self) -> None:
        trained, tested = (getattr(self, f"{name}_{self.unit}") for name in ("trained", "tested"))
        if tested < trained:
            raise ValueError(
                f"tested_{self.unit} is {tested}, less than trained_{self.unit}, {trained}; evaluation covers both."
            )
        if self.stride > trained:
            raise ValueError(
                f"stride is {self.stride}, more than trained_{self.unit}, {trained}; it would skip all trained sizes."
            )

    def sizes(self, tested: int) -> list[int]:
        """The sizes to evaluate, up to the largest."""
        return list(range(self.stride, tested + 1, self.stride))


def evaluate_lengths(
    task: PromptTask, model: Any, trained: int, tested: int, unit: str, seed: int, budget: float
) -> Evaluation:
    """Exact match against a size up to `tested`, of which those up to `trained` were trained on."""
    assert isinstance(task.options, LengthOptions)
    sizes = task.options.sizes(tested)
    scores = task.score_cells(model, [(size,) for size in sizes], seed, budget)

    def seen(cell: Cell) -> bool:
        return cell[0] <= trained

    return Evaluation(
        metrics={
            "exact_match_inside": mean_percent(scores, seen),
            "exact_match_outside": mean_percent(scores, lambda cell: not seen(cell)),
        },
        curves=[
            Curve(
                title=f"exact match against {unit}",
                x_label=unit,
                x=[float(size) for size in sizes],
                y_label="exact match",
                y=[scores[size,] for size in sizes],
            )
        ],
    )
