"""Results of runs, comparisons and evaluations: the dataclasses stored in run.json, results.json and report.json.

`to_dict` returns the JSON data of a file; `from_dict` reads it, including files of older versions. NaN and infinity are
null in JSON and None here.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Any, Self, get_args, get_origin, get_type_hints

from ..settings import is_required
from .files import plain

DONE, NAN, FAILED, MISSING = "done", "nan", "failed", "missing"
"""How a run ended: finished, stopped by a NaN or infinite loss, stopped by an error, or not run yet."""
PERCENT = "%"
ARROWS = {True: " ↑", False: " ↓", None: ""}
"""Towards better values."""


@dataclass(frozen=True, kw_only=True)
class Stored:
    """Base class of results stored as JSON."""

    # without an annotation, which would make it a field
    origin = "a file of equitape"
    """What `read` expects, in its error."""

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Self:
        """Read plain data. Unknown keys, from later versions, are ignored; null is a field's default, if it has one."""
        hints, required = get_type_hints(cls), {entry.name for entry in fields(cls) if is_required(entry)}
        known = [entry.name for entry in fields(cls) if entry.name in content]
        kept = [name for name in known if content[name] is not None or name in required]
        return cls(**{name: rebuild(hints[name], content[name]) for name in kept})

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file; an error in one sentence where it does not hold this."""
        try:
            return cls.from_dict(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path} is not {cls.origin} ({error}).") from None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return plain(asdict(self))


def rebuild(hint: Any, value: Any) -> Any:
    """Plain data as its annotation asks, where that names `Stored` classes; all else stays as it is."""
    origin, parts = get_origin(hint), get_args(hint)
    if isinstance(hint, type) and issubclass(hint, Stored):
        return hint.from_dict(value)
    if origin in (list, tuple):
        return origin(rebuild(parts[0], each) for each in value)
    if origin is dict:
        return {key: rebuild(parts[1], each) for key, each in value.items()}
    return rebuild(parts[0], value) if origin is UnionType and value is not None else value


@dataclass(frozen=True, kw_only=True)
class Metric(Stored):
    """How to read the figures of one metric. The task that computes the metric declares it."""

    name: str
    """A figure belongs to the metric by this name or prefix: "exact_match" covers "exact_match_outside"."""
    higher_is_better: bool | None
    """None if neither direction is better."""
    unit: str = ""
    """"%" for percentages; empty for plain numbers."""

    def covers(self, name: str) -> bool:
        """Whether a figure of this name belongs to this metric."""
        return name == self.name or name.startswith(f"{self.name}_")

    def title(self, name: str) -> str:
        """A figure's name as words, its unit, and an arrow towards better values."""
        return name.replace("_", " ") + (f", {self.unit}" if self.unit else "") + ARROWS[self.higher_is_better]


ACCURACY = Metric(name="accuracy", higher_is_better=True, unit=PERCENT)
TOKEN_ACCURACY = Metric(name="token_accuracy", higher_is_better=True, unit=PERCENT)
EXACT_MATCH = Metric(name="exact_match", higher_is_better=True, unit=PERCENT)
ERROR = Metric(name="error", higher_is_better=False, unit=PERCENT)
SCORE = Metric(name="score", higher_is_better=True, unit=PERCENT)
LOSS = Metric(name="loss", higher_is_better=False)
PERPLEXITY = Metric(name="perplexity", higher_is_better=False)
BITS_PER_BYTE = Metric(name="bits_per_byte", higher_is_better=False)
KNOWN_METRICS = (ACCURACY, TOKEN_ACCURACY, EXACT_MATCH, ERROR, SCORE, LOSS, PERPLEXITY, BITS_PER_BYTE)
"""Metrics that several tasks compute, and those of files older than declared metrics."""


def find_metric(
    declared: Iterable[Metric], name: str, headline: str | None = None, higher_is_better: bool | None = None
) -> Metric:
    """The most specific declared metric that covers a figure; otherwise one without a direction, but for the headline.

    higher_is_better: the direction of the headline.
    """
    covering = [metric for metric in declared if metric.covers(name)]
    found = max(covering, key=lambda metric: len(metric.name), default=Metric(name=name, higher_is_better=None))
    if found.higher_is_better is None and name == headline:
        return Metric(name=name, higher_is_better=higher_is_better, unit=found.unit)
    return found


@dataclass(frozen=True, kw_only=True)
class HeatMap(Stored):
    """A score for each pair of values of two properties, such as exact match by the lengths of both operands."""

    title: str
    row_label: str
    rows: list[Any]
    """Row labels."""
    column_label: str
    columns: list[Any]
    values: list[list[float]]
    """One list per row; NaN (None if read from a file) for a missing score."""


@dataclass(frozen=True, kw_only=True)
class Curve(Stored):
    """A score against one property, such as perplexity against length."""

    title: str
    x_label: str
    x: list[float]
    y_label: str
    y: list[float]
    low: list[float] | None = None
    high: list[float] | None = None
    """95 % confidence interval at every place, if known."""


@dataclass(frozen=True, kw_only=True)
class Bars(Stored):
    """Scores of several items, such as tasks or length bins; NaN for a missing score."""

    title: str
    row_label: str
    rows: list[str]
    value_label: str
    values: list[float]
    counts: list[int] | None = None
    """Number of examples per score, if it varies."""
    most: float | None = None
    """The highest possible score, if known."""
    errors: list[float] | None = None
    """Standard error per score; NaN if unknown."""


@dataclass(frozen=True, kw_only=True)
class Evaluation(Stored):
    """Scores of a trained model. Figures with "outside" in their name are out of distribution, all others inside."""

    metrics: dict[str, float]
    heat_maps: list[HeatMap] = field(default_factory=list)
    curves: list[Curve] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class RunResult(Stored):
    """One run of a recipe: one encoding trained with one seed. run.json holds it."""

    label: str
    """Label of the encoding in reports, unique in a comparison ("tape", "tape, no carry")."""
    encoding: dict[str, Any]
    """{kind, ...} with all options."""
    seed: int
    status: str = MISSING
    """"done", "nan" (a loss or gradient was NaN or infinite), "failed", or "missing" (not run yet)."""
    note: str = "This run has not started yet."
    """One sentence if status is not "done", else empty."""
    parameters: int | None = None
    """Number of parameters."""
    steps: int = 0
    """Optimizer steps done."""
    trained_tokens: int = 0
    """Tokens seen, without padding."""
    seconds: float | None = None
    """Time of training steps including compilation, excluding evaluation, saving and start-up."""
    tokens_per_second: float | None = None
    peak_mib: float | None = None
    """Peak memory in training, of the GPU, or of the process without a GPU; None if unknown."""
    evaluate_seconds: float | None = None
    log: list[list[float]] = field(default_factory=list)
    """[[step, loss], ...], at most about 400 points, each the mean of the steps up to it."""
    evaluation: Evaluation | None = None
    """None unless status is "done"."""
    environment: dict[str, Any] | None = None
    """{equitape, torch, transformers, accelerate, python, device, processor, commit, date, side_by_side}; None for a
    run that has not started. commit: None outside a git checkout; ends with "+changes" if files differ from it.
    date: start of the run, UTC, ISO 8601. side_by_side: number of runs in parallel on the machine."""

    @property
    def done(self) -> bool:
        return self.status == DONE

    def metric(self, name: str) -> float | None:
        """A figure of the evaluation, or None."""
        return None if self.evaluation is None else self.evaluation.metrics.get(name)


@dataclass(frozen=True, kw_only=True)
class TaskResult(Stored):
    """The task of a comparison."""

    name: str
    idea: str = ""
    headline: str
    """Name of the headline metric."""
    higher_is_better: bool = True
    """Whether a higher headline is better."""
    trained_length: int | None = None
    tested_length: int | None = None
    metrics: tuple[Metric, ...] = KNOWN_METRICS
    """Metrics that the task computes."""
    warning: str = ""
    """A caveat about the data for readers of the scores."""

    def metric(self, name: str) -> Metric:
        """How to read a figure."""
        return find_metric(self.metrics, name, self.headline, self.higher_is_better)


@dataclass(frozen=True, kw_only=True)
class Comparison(Stored):
    """Every run of a recipe. results.json holds it, and reports are made from it."""

    origin = "a results.json of equitape compare"

    name: str
    """The recipe's name."""
    recipe: dict[str, Any]
    """The resolved recipe with overrides applied; as a file, it reproduces the comparison."""
    task: TaskResult
    claims: dict[str, dict[str, float]] = field(default_factory=dict)
    """{label: {metric: number}} published elsewhere for this task: claims, not measurements."""
    claims_source: str | None = None
    """Source of the claims, in one line."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment of the runs below, as text; values joined by commas if runs differ."""
    remarks: list[str] = field(default_factory=list)
    """Sentences about the runs, for the reader."""
    runs: list[RunResult]
    """In recipe order: encodings outside, seeds inside."""


@dataclass(frozen=True, kw_only=True)
class Report(Stored):
    """What a task finds in the records of one model."""

    protocol: list[str]
    """How it was measured, in sentences: lengths, strides, prompts, scores."""
    metrics: Mapping[str, float | None]
    short: Mapping[str, float | None] = field(default_factory=dict)
    """Quality at short lengths, which context extension must preserve."""
    notes: list[str] = field(default_factory=list)
    """Caveats for the reader: truncated or skipped examples, failures."""
    intervals: dict[str, list[float]] = field(default_factory=dict)
    """[low, high]: 95 % confidence intervals over documents, for metrics that have one."""
    grids: list[HeatMap] = field(default_factory=list)
    curves: list[Curve] = field(default_factory=list)
    bars: list[Bars] = field(default_factory=list)
    declared: tuple[Metric, ...] = ()
    """Metrics that only the records know. Default: those of the task's class."""


@dataclass(frozen=True, kw_only=True)
class EvaluationReport(Report):
    """One model evaluated on one task. report.json holds it."""

    origin = "a report.json of equitape eval"

    task: str
    options: dict[str, Any]
    examples: dict[str, Any]
    """Which examples were scored: counts and data digests."""
    model: dict[str, Any]
    """name, class, encoding, context, parameters, dtype, weights."""
    idea: str = ""
    headline: str
    higher_is_better: bool = True
    """Whether a higher headline is better."""
    declared: tuple[Metric, ...] = KNOWN_METRICS
    """How to read the figures in `metrics` and `short`."""
    cost: dict[str, Any] = field(default_factory=dict)
    """seconds, tokens, peak_mib; None if unknown."""
    environment: dict[str, Any] = field(default_factory=dict)

    def metric(self, name: str) -> Metric:
        """How to read a figure."""
        return find_metric(self.declared, name, self.headline, self.higher_is_better)
