"""The tables of a report as plain cells, which the HTML and the Markdown templates both lay out."""

import math
from collections.abc import Callable
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
    """Four significant digits, or as many decimals as asked for; thousands apart."""
    if not math.isfinite(value):
        return "infinite" if math.isinf(value) else MISSING
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


def duration(seconds: float) -> str:
    """Seconds, minutes or hours, whichever reads best."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


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


def readable(name: str) -> str:
    """A metric's name as words."""
    return name.replace("_", " ")


def headline_table(summary: Summary) -> Table:
    """The task's headline metric with what it cost beside it."""
    name = summary.headline
    best = summary.best(name)
    rows = [
        [
            name_cell(group),
            spread_cell(group.metric(name), best == group.label),
            plain_cell(group.spread("parameters"), quantity),
            plain_cell(group.spread("trained_tokens"), quantity),
            plain_cell(group.spread("seconds"), duration),
            plain_cell(group.spread("tokens_per_second"), lambda rate: f"{rate:,.0f}"),
            plain_cell(group.spread("peak_mib"), lambda size: f"{size:,.0f}"),
        ]
        for group in summary.groups
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
                    Cell(text=MISSING if run.get("seconds") is None else duration(run["seconds"])),
                    Cell(text=run.get("note") or "", kind="words"),
                ]
            )
    columns = ["encoding", "seed", "status", readable(summary.headline), "last loss at step", "time", "note"]
    return Table(title="Every run", columns=columns, rows=rows)


def claims_table(summary: Summary) -> Table | None:
    """Published numbers beside ours; None where the recipe names none."""
    claims: dict[str, dict[str, float]] = summary.results.get("claims") or {}
    metrics = list(dict.fromkeys(metric for values in claims.values() for metric in values))
    if not metrics:
        return None
    groups = {group.label: group for group in summary.groups}
    rows = []
    for label in [*groups, *(label for label in claims if label not in groups)]:
        row = [name_cell(groups[label]) if label in groups else Cell(text=label, detail="not run here")]
        for metric in metrics:
            row.append(spread_cell(groups[label].metric(metric)) if label in groups else Cell(text=MISSING))
            claimed = claims.get(label, {}).get(metric)
            row.append(Cell(text=MISSING if claimed is None else number(claimed)))
        rows.append(row)
    columns = ["encoding"]
    for metric in metrics:
        columns += [f"{readable(metric)}, ours", f"{readable(metric)}, claimed"]
    source = summary.results.get("claims_source") or "a source that the recipe does not name"
    return Table(
        title="Beside published numbers",
        columns=columns,
        rows=rows,
        notes=[f"Claimed: {source}. These are claims, not measurements of ours; sizes and budgets may differ."],
    )


def as_float(value: Any) -> float:
    """JSON's null is a number that was not one."""
    return math.nan if value is None else float(value)
