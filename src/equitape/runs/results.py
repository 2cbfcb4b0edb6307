"""Results of runs, comparisons and evaluations as dataclasses; run.json, results.json and report.json hold them.

`to_dict` gives the JSON of a file and `from_dict` reads it, also where an older version wrote it. NaN and infinity are
null in JSON and None here.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from .files import plain

DONE, NAN, FAILED, MISSING = "done", "nan", "failed", "missing"
"""How a run ended: finished, stopped at a NaN or infinite loss, stopped by an error, or not run yet."""
PERCENT = "%"


@dataclass(frozen=True, kw_only=True)
class Metric:
    """How to read the figures of one metric. The task that computes a metric declares it."""

    name: str
    """Figures are called this, or start with it and an underscore: "exact_match" covers "exact_match_outside"."""
    higher_is_better: bool | None
    """None where neither direction is better."""
    unit: str = ""
    """"%" for shares in per cent; empty for plain numbers."""

    def covers(self, name: str) -> bool:
        """Whether a figure of this name is of this metric."""
        return name == self.name or name.startswith(f"{self.name}_")


ACCURACY = Metric(name="accuracy", higher_is_better=True, unit=PERCENT)
TOKEN_ACCURACY = Metric(name="token_accuracy", higher_is_better=True, unit=PERCENT)
EXACT_MATCH = Metric(name="exact_match", higher_is_better=True, unit=PERCENT)
ERROR = Metric(name="error", higher_is_better=False, unit=PERCENT)
SCORE = Metric(name="score", higher_is_better=True, unit=PERCENT)
LOSS = Metric(name="loss", higher_is_better=False)
PERPLEXITY = Metric(name="perplexity", higher_is_better=False)
BITS_PER_BYTE = Metric(name="bits_per_byte", higher_is_better=False)
KNOWN_METRICS = (ACCURACY, TOKEN_ACCURACY, EXACT_MATCH, ERROR, SCORE, LOSS, PERPLEXITY, BITS_PER_BYTE)
"""Metrics that several tasks compute; also those of files from before tasks declared their metrics."""


def find_metric(declared: Iterable[Metric], name: str) -> Metric:
    """The most specific declared metric that covers a figure; one without a direction where none does."""
    covering = [metric for metric in declared if metric.covers(name)]
    return max(covering, key=lambda metric: len(metric.name), default=Metric(name=name, higher_is_better=None))


@dataclass(frozen=True, kw_only=True)
class Stored:
    """Base of what is stored as JSON."""

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Self:
        """Read plain data. Unknown keys, of a later version, are ignored."""
        known = {entry.name for entry in fields(cls)}
        return cls(**{key: value for key, value in content.items() if key in known})

    def to_dict(self) -> dict[str, Any]:
        """Plain data, fit for JSON."""
        return plain(asdict(self))


@dataclass(frozen=True, kw_only=True)
class HeatMap(Stored):
    """A score for every pair of two properties, for example exact match by the lengths of both operands."""

    title: str
    row_label: str
    rows: list[Any]
    """Names or numbers of the rows."""
    column_label: str
    columns: list[Any]
    values: list[list[float]]
    """One list per row; NaN (None when read from a file) where there is no score."""


@dataclass(frozen=True, kw_only=True)
class Curve(Stored):
    """A score against one property, for example perplexity against length."""

    title: str
    x_label: str
    x: list[float]
    y_label: str
    y: list[float]


@dataclass(frozen=True, kw_only=True)
class Bars(Stored):
    """A score of several things, such as tasks or bins of lengths; NaN where there is no score."""

    title: str
    row_label: str
    rows: list[str]
    value_label: str
    values: list[float]
    counts: list[int] | None = None
    """How many examples each score is of, where that differs."""
    most: float | None = None
    """The highest possible score, where it is known."""
    errors: list[float] | None = None
    """The standard error of each score; NaN where it is unknown."""


@dataclass(frozen=True, kw_only=True)
class Evaluation(Stored):
    """What a trained model scored. Figures whose names contain "outside" are out of distribution, all others inside."""

    metrics: dict[str, float]
    heat_maps: list[HeatMap] = field(default_factory=list)
    curves: list[Curve] = field(default_factory=list)

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Self:
        return cls(
            metrics=content["metrics"],
            heat_maps=[HeatMap.from_dict(entry) for entry in content.get("heat_maps") or []],
            curves=[Curve.from_dict(entry) for entry in content.get("curves") or []],
        )


@dataclass(frozen=True, kw_only=True)
class RunResult(Stored):
    """One run of a recipe: one encoding trained with one seed. run.json holds it."""

    label: str
    """What reports call the encoding, unique in a comparison ("tape", "tape, no carry")."""
    encoding: dict[str, Any]
    """{kind, ...} with every option."""
    seed: int
    status: str = MISSING
    """"done", "nan" (a loss or gradient was NaN or infinite), "failed", or "missing" (not run yet)."""
    note: str = "This run has not been made yet."
    """One sentence where status is not "done", else empty."""
    parameters: int | None = None
    """Number of weights."""
    steps: int = 0
    """Optimizer steps done."""
    trained_tokens: int = 0
    """Tokens seen, without padding."""
    seconds: float | None = None
    """Time of training steps, compilation included; without evaluation, saving and start-up."""
    tokens_per_second: float | None = None
    peak_mib: float | None = None
    """Peak memory while training, of the GPU or, without one, of the process; None where it is unknown."""
    evaluate_seconds: float | None = None
    log: list[list[float]] = field(default_factory=list)
    """[[step, loss], ...], at most about 400 points, each the mean of the steps up to it."""
    evaluation: Evaluation | None = None
    """None unless status is "done"."""
    environment: dict[str, Any] | None = None
    """{equitape, torch, transformers, accelerate, python, device, processor, commit, date, side_by_side}; None for a
    run that was not made. commit: None outside a git checkout, with "+changes" after it when files differ from it.
    date: start of the run, UTC, ISO 8601. side_by_side: how many runs shared the machine."""

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Self:
        evaluation = content.get("evaluation")
        given = {**content, "evaluation": None if evaluation is None else Evaluation.from_dict(evaluation)}
        return super().from_dict(given)

    @property
    def done(self) -> bool:
        return self.status == DONE

    def metric(self, name: str) -> float | None:
        """A figure of the evaluation; None where there is none."""
        return None if self.evaluation is None else self.evaluation.metrics.get(name)


@dataclass(frozen=True, kw_only=True)
class TaskResult(Stored):
    """The task of a comparison."""

    name: str
    idea: str = ""
    headline: str
    """The metric to show first."""
    higher_is_better: bool = True
    """Of the headline."""
    trained_length: int | None = None
    tested_length: int | None = None
    metrics: tuple[Metric, ...] = KNOWN_METRICS
    """What the task computes."""
    warning: str = ""
    """What readers of the scores must know about the data."""

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Self:
        metrics = content.get("metrics")
        declared = KNOWN_METRICS if metrics is None else tuple(Metric(**entry) for entry in metrics)
        return super().from_dict({**content, "metrics": declared})

    def metric(self, name: str) -> Metric:
        """How to read a figure."""
        found = find_metric(self.metrics, name)
        if found.higher_is_better is None and name == self.headline:
            return Metric(name=name, higher_is_better=self.higher_is_better, unit=found.unit)
        return found


@dataclass(frozen=True, kw_only=True)
class Comparison(Stored):
    """Every run of a recipe. results.json holds it, and reports are made from it."""

    name: str
    """The recipe's name."""
    recipe: dict[str, Any]
    """The whole resolved recipe, overrides applied; written to a file, it repeats the comparison."""
    task: TaskResult
    claims: dict[str, dict[str, float]] = field(default_factory=dict)
    """{label: {metric: number}} that others published for this task: claims, not measurements."""
    claims_source: str | None = None
    """Who claims them, in one line."""
    environment: dict[str, str] = field(default_factory=dict)
    """Of the runs below, as text; values joined by commas where runs differ."""
    runs: list[RunResult]
    """In the order of the recipe: encodings outside, seeds inside."""

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Self:
        given = {
            **content,
            "task": TaskResult.from_dict(content["task"]),
            "runs": [RunResult.from_dict(entry) for entry in content["runs"]],
        }
        return super().from_dict(given)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a results.json; one sentence where it is none."""
        try:
            return cls.from_dict(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is not a results.json of equitape compare ({error}).") from None


@dataclass(frozen=True, kw_only=True)
class EvaluationReport(Stored):
    """One model evaluated on one task. report.json holds it."""

    task: str
    options: dict[str, Any]
    examples: dict[str, Any]
    """Which examples were scored: counts and digests of the data."""
    model: dict[str, Any]
    """name, class, encoding, context, parameters, dtype, weights."""
    idea: str = ""
    headline: str
    higher_is_better: bool = True
    """Of the headline."""
    declared: tuple[Metric, ...] = KNOWN_METRICS
    """How to read the figures in `metrics` and `short`."""
    protocol: list[str]
    """How it was measured, in sentences."""
    metrics: dict[str, float | None]
    short: dict[str, float | None] = field(default_factory=dict)
    """Quality at short lengths, which a longer context must not cost."""
    intervals: dict[str, list[float]] = field(default_factory=dict)
    """[low, high] of metrics that have an interval: 95 %, over documents."""
    notes: list[str] = field(default_factory=list)
    """What a reader must know: what was cut, left out or could not be run."""
    grids: list[HeatMap] = field(default_factory=list)
    curves: list[Curve] = field(default_factory=list)
    bars: list[Bars] = field(default_factory=list)
    cost: dict[str, Any] = field(default_factory=dict)
    """seconds, tokens, peak_mib; None where unknown."""
    environment: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Self:
        declared = content.get("declared")
        given = {
            **content,
            "declared": KNOWN_METRICS if declared is None else tuple(Metric(**entry) for entry in declared),
            "grids": [HeatMap.from_dict(entry) for entry in content.get("grids") or []],
            "curves": [Curve.from_dict(entry) for entry in content.get("curves") or []],
            "bars": [Bars.from_dict(entry) for entry in content.get("bars") or []],
        }
        return super().from_dict(given)

    def metric(self, name: str) -> Metric:
        """How to read a figure."""
        found = find_metric(self.declared, name)
        if found.higher_is_better is None and name == self.headline:
            return Metric(name=name, higher_is_better=self.higher_is_better, unit=found.unit)
        return found

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a report.json; one sentence where it is none."""
        try:
            return cls.from_dict(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is not a report.json of equitape eval ({error}).") from None
