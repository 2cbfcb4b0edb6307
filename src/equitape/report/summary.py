"""From the runs of a comparison to figures over seeds: mean, spread, and who leads by more than the spread."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

DONE, MISSING_RUN = "done", "missing"
OUTSIDE = "outside"
"""Metrics whose names hold this word are out of distribution."""
LOWER_IS_BETTER = ("perplexity", "loss", "bits", "error", "nll")
HIGHER_IS_BETTER = ("match", "accuracy", "exact", "f1", "rouge", "score")
BEST_RULE = (
    "An encoding is marked best (★) only where its mean leads the mean of every other by more than the standard "
    "deviations of the two over seeds added, with two seeds or more on both sides and all of its own runs done."
)
SHARES = ("match", "accuracy", "error")
SHARES_RULE = "Matches, accuracies and errors are in per cent in tables and from 0 to 1 in pictures."


@dataclass(frozen=True, kw_only=True)
class Spread:
    """One figure over seeds."""

    values: tuple[float, ...]

    @property
    def count(self) -> int:
        return len(self.values)

    @property
    def mean(self) -> float:
        return math.fsum(self.values) / len(self.values)

    @property
    def deviation(self) -> float | None:
        """Standard deviation of the sample (n - 1); None for a single value, whose spread is not known."""
        if len(self.values) < 2:
            return None
        # a model that diverged may have an infinite perplexity
        return statistics.stdev(self.values) if all(map(math.isfinite, self.values)) else math.inf

    @property
    def low(self) -> float:
        return min(self.values)

    @property
    def high(self) -> float:
        return max(self.values)

    def leads(self, other: "Spread", higher_is_better: bool) -> bool:
        """Whether this mean is better by more than both standard deviations; never where one of them is not known."""
        if self.deviation is None or other.deviation is None:
            return False
        gap = self.mean - other.mean if higher_is_better else other.mean - self.mean
        return gap > self.deviation + other.deviation


def spread_of(values: Iterable[float | None]) -> Spread | None:
    """The figures that are there: JSON has null where a run has no number; None when none has."""
    kept = tuple(float(value) for value in values if value is not None and not math.isnan(value))
    return Spread(values=kept) if kept else None


@dataclass(frozen=True, kw_only=True)
class Group:
    """All runs of one encoding."""

    label: str
    runs: tuple[dict[str, Any], ...]

    @property
    def finished(self) -> list[dict[str, Any]]:
        return [run for run in self.runs if run["status"] == DONE]

    @property
    def unfinished(self) -> list[dict[str, Any]]:
        """Runs that failed, and those that were not run yet."""
        return [run for run in self.runs if run["status"] != DONE]

    def spread(self, field: str) -> Spread | None:
        """Over seeds, of a field that every run has: parameters, seconds, ..."""
        return spread_of(run.get(field) for run in self.finished)

    def metric(self, name: str) -> Spread | None:
        """Over seeds, of a metric of the evaluation."""
        return spread_of(run["evaluation"]["metrics"].get(name) for run in self.finished)

    def beside(self, other: "Group", name: str) -> Spread | None:
        """How much more of a metric this has than the other, seed by seed, over the seeds that both have."""
        theirs = {run["seed"]: run["evaluation"]["metrics"].get(name) for run in other.finished}
        pairs = [(run["evaluation"]["metrics"].get(name), theirs.get(run["seed"])) for run in self.finished]
        return spread_of(mine - its for mine, its in pairs if mine is not None and its is not None)


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The groups of a comparison in the order in which they were run."""

    results: dict[str, Any]
    groups: tuple[Group, ...]

    @property
    def labels(self) -> list[str]:
        return [group.label for group in self.groups]

    @property
    def headline(self) -> str:
        return self.results["task"]["headline"]

    @property
    def unfinished(self) -> list[dict[str, Any]]:
        return [run for group in self.groups for run in group.unfinished]

    @property
    def seeds(self) -> list[int]:
        return sorted({run["seed"] for group in self.groups for run in group.runs})

    @property
    def seed_counts(self) -> list[int]:
        """How many seeds each encoding has."""
        return [len(group.runs) for group in self.groups]

    def trained_up_to(self, label: str) -> float | None:
        """Where training ended on an axis with this label: the task's option `trained_UNIT`, or its trained length in
        tokens; None where neither is of this unit.
        """
        words = label.split()
        for option, value in (self.results["recipe"].get("task") or {}).items():
            if option.startswith("trained_") and option.removeprefix("trained_") in words:
                return float(value)
        length = self.results["task"].get("trained_length")
        return float(length) if length is not None and "tokens" in words else None

    def metric_names(self, outside: bool) -> list[str]:
        """Names in the order of first appearance, of metrics in or out of distribution."""
        names = dict.fromkeys(
            name for group in self.groups for run in group.finished for name in run["evaluation"]["metrics"]
        )
        return [name for name in names if (OUTSIDE in name) == outside]

    @property
    def has_shares(self) -> bool:
        """Whether a metric is a share, which tasks give in per cent."""
        names = [*self.metric_names(outside=False), *self.metric_names(outside=True)]
        return any(word in name for name in names for word in SHARES)

    def higher_is_better(self, metric: str) -> bool | None:
        """The task says it for its headline; for others the name does, or nothing does."""
        if metric == self.headline:
            return bool(self.results["task"]["higher_is_better"])
        if any(word in metric.lower() for word in LOWER_IS_BETTER):
            return False
        if any(word in metric.lower() for word in HIGHER_IS_BETTER):
            return True
        return None

    def best(self, metric: str) -> str | None:
        """The label that leads all others by more than the spread (BEST_RULE); None where none does."""
        direction = self.higher_is_better(metric)
        found = {group.label: (group, group.metric(metric)) for group in self.groups}
        known = {label: (group, spread) for label, (group, spread) in found.items() if spread is not None}
        if direction is None or len(known) < 2:
            return None
        for label, (group, spread) in known.items():
            rivals = [other for name, (_, other) in known.items() if name != label]
            if not group.unfinished and all(spread.leads(other, direction) for other in rivals):
                return label
        return None


def summarise(results: dict[str, Any]) -> Summary:
    """Group the runs by label."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for run in results["runs"]:
        groups.setdefault(run["label"], []).append(run)
    if not groups:
        raise ValueError("The results hold no runs; there is nothing to report.")
    return Summary(
        results=results, groups=tuple(Group(label=label, runs=tuple(runs)) for label, runs in groups.items())
    )


def mean_grid(grids: Sequence[list[list[float | None]]]) -> list[list[float]]:
    """The mean over seeds of every cell of heat maps of one shape; NaN where no seed has a number."""

    def mean(cells: tuple[float | None, ...]) -> float:
        spread = spread_of(cells)
        return spread.mean if spread else math.nan

    return [[mean(cells) for cells in zip(*rows, strict=True)] for rows in zip(*grids, strict=True)]


def curve_spreads(curves: Sequence[dict[str, Any]]) -> list[tuple[float, Spread]]:
    """(x, values over seeds) in the order of x, for curves of one title."""
    points: dict[float, list[float | None]] = {}
    for curve in curves:
        for x, y in zip(curve["x"], curve["y"], strict=True):
            points.setdefault(x, []).append(y)
    spreads = [(x, spread_of(points[x])) for x in sorted(points)]
    return [(x, spread) for x, spread in spreads if spread is not None]
