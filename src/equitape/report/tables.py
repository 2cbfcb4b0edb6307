"""The tables of a report as plain cells, which the HTML and the Markdown templates both lay out."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .summary import DONE, MISSING_RUN, Group, Spread, Summary

MISSING = "-"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What a cell says, and in smaller letters below it how far the seeds spread."""

    text: str
    detail: str = ""
    kind: str = ""
    """How it is shown: "best", "failed", "words" or plainly."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Columns and rows; the first cell of each row names it."""

    title: str
    columns: list[str]
    rows: list[list[Cell]]
    notes: list[str] = field(default_factory=list)


def decimals(value: float) -> int:
    """How many decimals show four significant digits."""
    if value == 0 or not math.isfinite(value):
        return 2
    return min(max(0, 3 - math.floor(math.log10(abs(value)))), 8)


def number(value: float, places: int | None = None) -> str:
    """Four significant digits, or as many decimals as asked for; thousands apart, tiny ones in powers of ten."""
    if not math.isfinite(value):
        return "infinite" if math.isinf(value) else MISSING
    if places is None and 0 < abs(value) < 1e-6:
        return f"{value:.1e}"
    return f"{value:,.{decimals(value) if places is None else places}f}"


def spread_cell(spread: Spread | None, best: bool = False) -> Cell:
    """Mean ± standard deviation, and the range below it, all to the decimals of the mean."""
    if spread is None:
        return Cell(text=MISSING)
    if spread.deviation is None:
        return Cell(text=number(spread.mean), detail="n = 1")
    places = decimals(spread.mean)
    low, high, deviation = (number(value, places) for value in (spread.low, spread.high, spread.deviation))
    text = f"{number(spread.mean)} ± {deviation}"
    return Cell(text=text, detail=f"{low} … {high}, n = {spread.count}", kind="best" if best else "")


def plain_cell(spread: Spread | None, show: Callable[[float], str] = number) -> Cell:
    """A figure that seeds share, or its mean."""
    return Cell(text=MISSING) if spread is None else Cell(text=show(spread.mean))


def duration(seconds: float, shortest: float | None = None) -> str:
    """Seconds, minutes or hours, whichever reads best for the shortest of those it stands among, or for itself."""
    shortest = seconds if shortest is None else shortest
    size, unit = (1, "s") if shortest < 120 else (60, "min") if shortest < 7200 else (3600, "h")
    return f"{seconds / size:,.1f} {unit}"


def durations(column: Sequence[float | None]) -> list[Cell]:
    """A column of durations in one unit, so that they can be compared at a glance."""
    shortest = min((seconds for seconds in column if seconds is not None), default=None)
    return [Cell(text=MISSING if seconds is None else duration(seconds, shortest)) for seconds in column]


def quantity(count: float) -> str:
    """1234567 as 1.235 M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{number(count / size)} {letter}"
    return f"{count:.0f}"


def name_cell(group: Group) -> Cell:
    """The encoding, with the runs that its figures lack counted below it."""
    missing = sum(run["status"] == MISSING_RUN for run in group.unfinished)
    counts = {"failed": len(group.unfinished) - missing, "missing": missing}
    told = [f"{count} of {len(group.runs)} runs {what}" for what, count in counts.items() if count]
    return Cell(text=group.label, detail=", ".join(told), kind="failed" if told else "")


def direction(summary: Summary, metric: str) -> str:
    """An arrow that tells which way is better."""
    return {True: " ↑", False: " ↓", None: ""}[summary.higher_is_better(metric)]


def metric_table(summary: Summary, title: str, names: list[str]) -> Table:
    """One row an encoding, one column a metric."""
    best = {name: summary.best(name) for name in names}
    return Table(
        title=title,
        columns=["encoding", *(readable(name) + direction(summary, name) for name in names)],
        rows=[
            [name_cell(group), *(spread_cell(group.metric(name), best[name] == group.label) for name in names)]
            for group in summary.groups
        ],
    )


def paired_table(summary: Summary, names: list[str]) -> Table | None:
    """What changes when the encoding does and the seed does not; None where no two runs of an encoding can tell."""
    first, *others = summary.groups
    differences = {other.label: [other.beside(first, name) for name in names] for other in others}
    if not any(spread and spread.count > 1 for row in differences.values() for spread in row):
        return None
    encodings = summary.results["recipe"].get("encodings") or []
    started = any(isinstance(encoding, dict) and "start" in encoding for encoding in encodings)
    weights = "" if started else " began with the same weights, where both have them, and"
    return Table(
        title=f'Beside "{first.label}", paired by seed',
        columns=["encoding", *(readable(name) + direction(summary, name) for name in names)],
        rows=[[Cell(text=label), *map(difference_cell, spreads)] for label, spreads in differences.items()],
        notes=[
            f'Differences to "{first.label}", each to its run with the same seed, which{weights} saw the same data in '
            "the same order: what all runs of a seed share cancels."
        ],
    )


def difference_cell(spread: Spread | None) -> Cell:
    """Mean ± standard deviation, and the range below it, with signs, to two digits of the deviation."""
    if spread is None:
        return Cell(text=MISSING)
    if spread.deviation is None:
        return Cell(text=signed(spread.mean, decimals(spread.mean)), detail="n = 1")
    # four digits are shown of anything else
    places = max(0, decimals(spread.deviation or spread.mean) - 2)
    mean, low, high = (signed(value, places) for value in (spread.mean, spread.low, spread.high))
    return Cell(text=f"{mean} ± {number(spread.deviation, places)}", detail=f"{low} … {high}, n = {spread.count}")


def signed(value: float, places: int) -> str:
    """With a plus or a minus, unless nothing is left of it."""
    sign = "-" if value < 0 else "+"
    text = number(abs(value), places)
    return text if text.strip("0.") == "" else sign + text


def readable(name: str) -> str:
    """A metric's name as words."""
    return name.replace("_", " ")


def headline_table(summary: Summary) -> Table:
    """The task's headline metric with what it cost beside it."""
    name = summary.headline
    best = summary.best(name)
    seconds = [group.spread("seconds") for group in summary.groups]
    times = durations([None if spread is None else spread.mean for spread in seconds])
    rows = [
        [
            name_cell(group),
            spread_cell(group.metric(name), best == group.label),
            plain_cell(group.spread("parameters"), quantity),
            plain_cell(group.spread("trained_tokens"), quantity),
            time,
            plain_cell(group.spread("tokens_per_second"), lambda rate: f"{rate:,.0f}"),
            plain_cell(group.spread("peak_mib"), lambda size: f"{size:,.0f}"),
        ]
        for group, time in zip(summary.groups, times, strict=True)
    ]
    columns = [
        "encoding",
        readable(name) + direction(summary, name),
        "parameters",
        "trained tokens",
        "training time",
        "tokens/s",
        "peak MiB",
    ]
    return Table(
        title="Quality and cost",
        columns=columns,
        rows=rows,
        notes=[cost_note(summary)],
    )


def cost_note(summary: Summary) -> str:
    """What the figures of cost are worth."""
    note = "Time, speed and memory are means over seeds, of training alone"
    shared = max((run["environment"]["side_by_side"] for group in summary.groups for run in group.finished), default=1)
    if shared == 1:
        return f"{note}."
    return f"{note}; up to {shared} runs shared the machine at a time, so none had the speed it has alone."


def runs_table(summary: Summary) -> Table:
    """Every run, failed ones with the reason."""
    rows = []
    times = iter(durations([run.get("seconds") for group in summary.groups for run in group.runs]))
    for group in summary.groups:
        for run in group.runs:
            failed = run["status"] != DONE
            metrics = {} if failed else run["evaluation"]["metrics"]
            final = run["log"][-1] if run.get("log") else None
            headline = metrics.get(summary.headline)
            rows.append(
                [
                    Cell(text=group.label),
                    Cell(text=str(run["seed"])),
                    Cell(text=run["status"], kind="failed" if failed else ""),
                    Cell(text=MISSING if headline is None else number(headline)),
                    Cell(text=MISSING if final is None else f"{number(as_float(final[1]))} at {final[0]:,}"),
                    next(times),
                    Cell(text=run.get("note") or "", kind="words"),
                ]
            )
    columns = ["encoding", "seed", "status", readable(summary.headline), "last loss at step", "time", "note"]
    return Table(title="Every run", columns=columns, rows=rows)


def claims_table(summary: Summary) -> Table | None:
    """Published numbers beside ours; None where the recipe names none.

    Claims of a metric that the task does not compute stand by themselves, with our headline beside them.
    """
    claims: dict[str, dict[str, float]] = summary.results.get("claims") or {}
    metrics = list(dict.fromkeys(metric for values in claims.values() for metric in values))
    if not metrics:
        return None
    known = [*summary.metric_names(outside=False), *summary.metric_names(outside=True)]
    # before any run is finished nothing tells what the task computes
    foreign = [metric for metric in metrics if known and metric not in known]
    ours = [metric for metric in metrics if metric not in foreign]
    columns = [f"{readable(metric)}, {whose}" for metric in ours for whose in ("ours", "claimed")]
    columns += [f"{readable(metric)}, claimed{direction(summary, metric)}" for metric in foreign]
    source = summary.results.get("claims_source") or "a source that the recipe does not name"
    notes = [f"Claimed: {source}. These are claims, not measurements of ours; sizes and budgets may differ."]
    beside = bool(foreign) and summary.headline not in ours
    if foreign:
        names = " and ".join(map(readable, foreign))
        notes.append(f"Not measured here: {names}.")
    if beside:
        columns.append(f"{readable(summary.headline)}, ours, another measure{direction(summary, summary.headline)}")
        notes.append(
            f"Our {readable(summary.headline)} is another measure: only the order of the encodings may be compared."
        )
    groups = {group.label: group for group in summary.groups}
    rows = []
    for label in [*groups, *(label for label in claims if label not in groups)]:
        group = groups.get(label)
        row = [Cell(text=label, detail="not run here") if group is None else name_cell(group)]
        for metric in [*ours, *foreign]:
            if metric in ours:
                row.append(spread_cell(None if group is None else group.metric(metric)))
            claimed = claims.get(label, {}).get(metric)
            row.append(Cell(text=MISSING if claimed is None else number(claimed)))
        if beside:
            row.append(spread_cell(None if group is None else group.metric(summary.headline)))
        rows.append(row)
    return Table(title="Beside published numbers", columns=["encoding", *columns], rows=rows, notes=notes)


def as_float(value: Any) -> float:
    """JSON's null is a number that was not one."""
    return math.nan if value is None else float(value)
