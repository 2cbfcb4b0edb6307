"""The interface of an evaluation task: it makes examples, runs a model on them, and summarizes the records.

An evaluation is cut into units, each of which leaves one record of plain JSON. Units depend on the options alone, never
on which of them were done before, so an interrupted run goes on. A report is made from records, without the model.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ..runs.results import Report
from ..settings import Settings
from .base import TaskBase
from .evaluated_model import EvaluatedModel

Record = dict[str, Any]
Advance = Callable[[float], None]
"""Called with the cost of the part of a batch that is done."""


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A piece of work that is finished or not started."""

    key: str
    """Its name, unique in the evaluation."""
    length: int
    """Tokens in one row; units of one length share batches without padding."""
    rows: int = 1
    content: Any = None
    """Data for the task."""

    @property
    def cost(self) -> float:
        """Roughly proportional to its time; attention grows with the square of the length."""
        return self.rows * self.length * (1 + self.length / 16384)


class EvaluationTask(TaskBase):
    """An evaluation task with its options. Subclasses register under a name and override the methods below."""

    parts: ClassVar[tuple[str, ...]] = ()
    """Allowed names after a colon; empty: none allowed."""
    any_part: ClassVar[bool] = False
    """Whether any name is allowed after a colon."""
    mixes_lengths: ClassVar[bool] = False
    """Whether units of different lengths may share a batch."""

    unfinished: Path | None = None
    """Folder for answers inside unfinished units: an interruption then loses little. The runner sets and removes it."""

    def __init__(self, options: Settings, part: str | None = None):
        self.options = options
        self.part = part

    @property
    def full_name(self) -> str:
        """As `build_evaluation` takes it."""
        return self.name if self.part is None else f"{self.name}:{self.part}"

    def check_scoring(self) -> None:
        """Raise ValueError if a package for scoring is missing. Called before a model is loaded."""

    def check_data(self) -> None:
        """Raise ValueError if data or packages are missing. Called before a model is loaded."""

    def prepare(self, evaluated: EvaluatedModel) -> list[Unit]:
        """All units. Raises ValueError for anything that cannot be done, before any work."""
        raise NotImplementedError

    def settled_options(self) -> dict[str, Any]:
        """The options as plain data, with the defaults that `prepare` chose. Called after it."""
        return self.options.to_dict()

    def identity(self) -> dict[str, Any]:
        """Digests of the data that determines the examples, besides the options. Called after `prepare`."""
        return {}

    def digest(self) -> str | None:
        """Digest of examples that `identity` does not have; they may differ between compared evaluations."""
        return None

    def answer(self, evaluated: EvaluatedModel, units: list[Unit], batch_tokens: int, advance: Advance) -> list[Record]:
        """The records of units of one length, or of several lengths if task and model can mix them."""
        raise NotImplementedError

    def report(self, records: list[Record], facts: dict[str, Any]) -> Report:
        """Summarize the records. facts: settings.json, with the model and the examples."""
        raise NotImplementedError


def mean(values: Iterable[float]) -> float:
    """The mean; NaN for no values."""
    kept = list(values)
    return math.fsum(kept) / len(kept) if kept else math.nan
