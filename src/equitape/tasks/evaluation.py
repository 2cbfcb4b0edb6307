"""The interface of an evaluation: it makes examples, has a model answer them, and sums up what was written down.

An evaluation is cut into units, each of which leaves one record of plain JSON. Units depend on the options alone, never
on which of them were done before, so an interrupted run goes on. A report is made from records, without the model.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ..runs.results import Bars, Curve, HeatMap
from ..settings import Settings
from .base import TaskBase
from .evaluated_model import EvaluatedModel

Record = dict[str, Any]
Advance = Callable[[float], None]
"""Called with the cost of the part of a batch that is done."""


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A piece of work that is done whole or not at all."""

    key: str
    """Its name, unique in the evaluation."""
    length: int
    """Tokens in one row; units of one length share batches without padding."""
    rows: int = 1
    content: Any = None
    """What the task needs to do it."""

    @property
    def cost(self) -> float:
        """About proportional to the time it takes: attention grows with the square of the length."""
        return self.rows * self.length * (1 + self.length / 16384)


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a model achieved."""

    protocol: list[str]
    """How it was measured, in sentences: lengths, strides, prompts, scores."""
    metrics: dict[str, float]
    short: dict[str, float]
    """Quality at short lengths, which context extension must preserve."""
    notes: list[str] = field(default_factory=list)
    """What must not go unsaid: what was cut, left out or could not be run."""
    intervals: dict[str, list[float]] = field(default_factory=dict)
    """[low, high] of metrics, 95 % over documents."""
    grids: list[HeatMap] = field(default_factory=list)
    curves: list[Curve] = field(default_factory=list)
    bars: list[Bars] = field(default_factory=list)


class EvaluationTask(TaskBase):
    """An evaluation with its options. Subclasses register under a name and override what is below."""

    parts: ClassVar[tuple[str, ...]] = ()
    """What may follow the name after a colon; nothing may where this is empty."""
    any_part: ClassVar[bool] = False
    """Whether any part may follow."""
    mixes_lengths: ClassVar[bool] = False
    """Whether units of different lengths may be answered together."""

    def __init__(self, options: Settings, part: str | None = None):
        self.options = options
        self.part = part

    @property
    def full_name(self) -> str:
        """As `build_evaluation` takes it."""
        return self.name if self.part is None else f"{self.name}:{self.part}"

    def check_scoring(self) -> None:
        """Refuse a missing package that scores need. Called before a model is loaded."""

    def check_data(self) -> None:
        """Refuse data or packages that are missing. Called before a model is loaded."""

    def prepare(self, evaluated: EvaluatedModel) -> list[Unit]:
        """All units; what cannot be done is refused here, before any work."""
        raise NotImplementedError

    def settled_options(self) -> dict[str, Any]:
        """The options as plain data, with the defaults that `prepare` chose. Called after it."""
        return self.options.to_dict()

    def identity(self) -> dict[str, Any]:
        """Beyond the options, what decides the examples: digests of data. Called after `prepare`."""
        return {}

    def answer(self, evaluated: EvaluatedModel, units: list[Unit], batch_tokens: int, advance: Advance) -> list[Record]:
        """The records of some units of one length, or of any lengths where task and evaluated can mix them."""
        raise NotImplementedError

    def report(self, records: list[Record], facts: dict[str, Any]) -> Report:
        """Sum up. facts: what settings.json says of the model and the examples."""
        raise NotImplementedError


def mean(values: Iterable[float]) -> float:
    """NaN where there are none."""
    kept = list(values)
    return math.fsum(kept) / len(kept) if kept else math.nan
