"""Statistics of a comparison over seeds: means, spreads, paired differences, and the leader."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..runs.results import Comparison, Curve, RunResult

OUTSIDE, INSIDE = "outside", "inside"
"""Words in metric names that mark them as out of distribution or in distribution."""
PARTS = ("In distribution", "Out of distribution", "In and out of distribution together")
BEST_RULE = (
    "An encoding is marked best (★) only if its mean leads every other mean by more than the sum of their standard "
    "deviations over seeds, both have at least two seeds, and all its runs are done with a finite score."
)
T_95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""Two-sided 95 % quantiles of Student's t distribution for 1, 2, ... degrees of freedom."""


def t_95(degrees: int) -> float:
    """The two-sided 95 % quantile of Student's t distribution."""
    if degrees <= len(T_95):
        return T_95[degrees - 1]
    # first terms of the expansion around the normal distribution; error below 0.0005 here
    z = 1.959964
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)


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
        """Sample standard deviation (n - 1); None for a single value."""
        if len(self.values) < 2:
            return None
        # a diverged model may have infinite perplexity
        return statistics.stdev(self.values) if all(map(math.isfinite, self.values)) else math.inf

    @property
    def low(self) -> float:
        return min(self.values)

    @property
    def high(self) -> float:
        return max(self.values)

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % confidence interval of the mean by Student's t; None for a single value."""
        if self.deviation is None:
            return None
        if not math.isfinite(self.deviation):
            return -math.inf, math.inf
        reach = t_95(self.count - 1) * self.deviation / math.sqrt(self.count)
        return self.mean - reach, self.mean + reach

    def leads(self, other: "Spread", higher_is_better: bool) -> bool:
        """Whether this mean is better by more than both standard deviations; False if one is unknown."""
        if self.deviation is None or other.deviation is None:
            return False
        gap = self.mean - other.mean if higher_is_better else other.mean - self.mean
        return gap > self.deviation + other.deviation


def spread_of(values: Iterable[float | None]) -> Spread | None:
    """Statistics of the values, without None and NaN; None if nothing remains."""
    kept = tuple(float(value) for value in values if value is not None and not math.isnan(value))
    return Spread(values=kept) if kept else None


@dataclass(frozen=True, kw_only=True)
class Group:
    """All runs of one encoding."""

    label: str
    runs: tuple[RunResult, ...]

    @property
    def kind(self) -> str:
        """The encoding of its runs."""
        return self.runs[0].encoding["kind"]

    @property
    def finished(self) -> list[RunResult]:
        return [run for run in self.runs if run.done]

    @property
    def unfinished(self) -> list[RunResult]:
        """Failed runs, and runs that have not started."""
        return [run for run in self.runs if not run.done]

    def spread(self, field: str) -> Spread | None:
        """A field of every run, such as parameters or seconds, over seeds."""
        return spread_of(getattr(run, field) for run in self.finished)

    def metric(self, name: str) -> Spread | None:
        """A metric of the evaluation over seeds."""
        return spread_of(run.metric(name) for run in self.finished)

    def has_all(self, name: str) -> bool:
        """Whether every run is finished and has a metric; numbers that are not finite are not kept."""
        return all(run.done and run.metric(name) is not None for run in self.runs)

    def minus(self, other: "Group", name: str) -> Spread | None:
        """Paired differences of a metric to another group, over common seeds."""
        theirs = {run.seed: run.metric(name) for run in other.finished}
        pairs = [(run.metric(name), theirs.get(run.seed)) for run in self.finished]
        return spread_of(mine - its for mine, its in pairs if mine is not None and its is not None)


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The groups of a comparison in run order."""

    results: Comparison
    groups: tuple[Group, ...]
    alike: bool = True
    """Whether all runs share one recipe; merged runs may not."""

    @property
    def headline(self) -> str:
        """The headline metric: the task's, or its out-of-distribution part if it has one.

        A mean over trained and untrained lengths would mostly show how well the trained ones were learned.
        """
        given = self.results.task.headline
        outside = f"{stem(given)}_{OUTSIDE}"
        return outside if OUTSIDE not in given and outside in self.names else given

    @property
    def names(self) -> list[str]:
        """Names of all metrics in order of first appearance."""
        return list(
            dict.fromkeys(
                name
                for group in self.groups
                for run in group.finished
                if run.evaluation is not None
                for name in run.evaluation.metrics
            )
        )

    @property
    def unfinished(self) -> list[RunResult]:
        return [run for group in self.groups for run in group.unfinished]

    @property
    def seeds(self) -> list[int]:
        return sorted({run.seed for group in self.groups for run in group.runs})

    @property
    def seed_counts(self) -> list[int]:
        """Number of seeds per encoding."""
        return [len(group.runs) for group in self.groups]

    def trained_up_to(self, label: str) -> float | None:
        """Where training ended on an axis with this label; None if unknown.

        That is the task's option `trained_UNIT` for an axis in that unit, and its trained length for one in tokens.
        """
        words = label.split()
        for option, value in (self.results.recipe.get("task") or {}).items():
            if option.startswith("trained_") and option.removeprefix("trained_") in words:
                return float(value)
        length = self.results.task.trained_length
        return float(length) if length is not None and "tokens" in words else None

    def metric_names(self, part: str) -> list[str]:
        """Names of the metrics in one of PARTS."""
        return [name for name in self.names if self.part_of(name) == part]

    def part_of(self, name: str) -> str:
        """The part of PARTS that a metric belongs to."""
        if OUTSIDE in name:
            return PARTS[1]
        parts = {f"{stem(name)}_{INSIDE}", f"{stem(name)}_{OUTSIDE}"}
        return PARTS[2] if name not in parts and parts <= set(self.names) else PARTS[0]

    def higher_is_better(self, metric: str) -> bool | None:
        """As declared by the task; None if neither direction is better."""
        declared = self.results.task.metric(metric).higher_is_better
        # the headline's direction also holds for its out-of-distribution part
        return self.results.task.higher_is_better if declared is None and metric == self.headline else declared

    def unit(self, metric: str) -> str:
        """As declared by the task; empty for plain numbers."""
        return self.results.task.metric(metric).unit

    def best(self, metric: str) -> str | None:
        """The label that leads by more than the spread (BEST_RULE), or None."""
        direction = self.higher_is_better(metric)
        found = {group.label: (group, group.metric(metric)) for group in self.groups}
        known = {label: (group, spread) for label, (group, spread) in found.items() if spread is not None}
        if direction is None or len(known) < 2:
            return None
        for label, (group, spread) in known.items():
            rivals = [other for name, (_, other) in known.items() if name != label]
            if group.has_all(metric) and all(spread.leads(other, direction) for other in rivals):
                return label
        return None


def summarise(results: Comparison) -> Summary:
    """Group the runs by label."""
    groups: dict[str, list[RunResult]] = {}
    for run in results.runs:
        groups.setdefault(run.label, []).append(run)
    if not groups:
        raise ValueError("The results have no runs; run `equitape compare` first.")
    return Summary(
        results=results, groups=tuple(Group(label=label, runs=tuple(runs)) for label, runs in groups.items())
    )


def stem(name: str) -> str:
    """A metric's name without its part: "exact_match" of "exact_match_grid"."""
    for suffix in ("_grid", f"_{INSIDE}", f"_{OUTSIDE}"):
        name = name.removesuffix(suffix)
    return name


def mean_grid(grids: Sequence[Sequence[Sequence[float | None]]]) -> list[list[float]]:
    """The mean over seeds of every cell; NaN if no seed has a value."""

    def mean(cells: tuple[float | None, ...]) -> float:
        spread = spread_of(cells)
        return spread.mean if spread else math.nan

    return [[mean(cells) for cells in zip(*rows, strict=True)] for rows in zip(*grids, strict=True)]


def curve_spreads(curves: Sequence[Curve]) -> list[tuple[float, Spread]]:
    """(x, values over seeds) in order of x, for curves with one title."""
    points: dict[float, list[float | None]] = {}
    for curve in curves:
        for x, y in zip(curve.x, curve.y, strict=True):
            points.setdefault(x, []).append(y)
    spreads = [(x, spread_of(points[x])) for x in sorted(points)]
    return [(x, spread) for x, spread in spreads if spread is not None]
