"""The tables of a comparison."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from ..runs.results import ARROWS, PERCENT
from ..runs.results import MISSING as NOT_RUN
from .numbers import (
    MISSING,
    decimals,
    duration,
    number,
    percent_decimals,
    quantity,
    readable,
    signed,
    with_unit,
)  # fmt: skip
from .summary import Group, Spread, Summary
from .tables import Cell, Table


def spread_cell(spread: Spread | None, unit: str = "", best: bool = False) -> Cell:
    """Mean ± standard deviation, with the range below it, all with as many decimals as the mean."""
    if spread is None:
        return Cell(text=MISSING)
    if spread.deviation is None:
        return Cell(text=with_unit(spread.mean, unit), detail="n = 1")
    places = percent_decimals(spread.mean) if unit == PERCENT else decimals(spread.mean)
    low, high, deviation = (number(value, places) for value in (spread.low, spread.high, spread.deviation))
    text = f"{with_unit(spread.mean, unit)} ± {deviation}"
    return Cell(text=text, detail=f"{low} … {high}, n = {spread.count}", kind="best" if best else "")


def plain_cell(spread: Spread | None, show: Callable[[float], str] = number) -> Cell:
    """The mean, without its spread."""
    return Cell(text=MISSING) if spread is None else Cell(text=show(spread.mean))


def durations(column: Sequence[float | None]) -> list[Cell]:
    """A column of durations in one unit."""
    shortest = min((seconds for seconds in column if seconds is not None), default=None)
    return [Cell(text=MISSING if seconds is None else duration(seconds, shortest)) for seconds in column]


def name_cell(group: Group) -> Cell:
    """The encoding, with counts of its failed and missing runs below it."""
    missing = sum(run.status == NOT_RUN for run in group.unfinished)
    counts = {"failed": len(group.unfinished) - missing, "missing": missing}
    lacking = [f"{count} of {len(group.runs)} runs {what}" for what, count in counts.items() if count]
    return Cell(text=group.label, detail=", ".join(lacking), kind="failed" if lacking else "")


def title_of(summary: Summary, name: str) -> str:
    """A metric with its unit and direction."""
    return replace(summary.results.task.metric(name), higher_is_better=summary.higher_is_better(name)).title(name)


def metric_table(summary: Summary, title: str, names: list[str]) -> Table:
    """One row per encoding, one column per metric."""
    best = {name: summary.best(name) for name in names}
    return Table(
        title=title,
        columns=["encoding", *(title_of(summary, name) for name in names)],
        rows=[
            [
                name_cell(group),
                *(spread_cell(group.metric(name), summary.unit(name), best[name] == group.label) for name in names),
            ]
            for group in summary.groups
        ],
    )


def paired_table(summary: Summary, names: list[str]) -> Table | None:
    """Seed-paired differences to the first encoding; None unless two encodings share at least two seeds."""
    first, *others = summary.groups
    differences = {other.label: [other.minus(first, name) for name in names] for other in others}
    if not any(spread and spread.count > 1 for row in differences.values() for spread in row):
        return None
    encodings = summary.results.recipe.get("encodings") or []
    started = any(isinstance(encoding, dict) and "start" in encoding for encoding in encodings)
    weights = "" if started else " started from the same shared weights and"
    shared = f", which{weights} saw the same data in the same order, so what runs of one seed share cancels out."
    return Table(
        title=f'Compared with "{first.label}", paired by seed',
        columns=["encoding", *(title_of(summary, name) for name in names)],
        rows=[[Cell(text=label), *map(difference_cell, spreads)] for label, spreads in differences.items()],
        notes=[
            f'Mean differences to "{first.label}". Each run is compared with the run of the same seed'
            f"{shared if summary.alike else '; the runs were trained differently.'}",
            "Intervals are 95 % confidence intervals of the mean difference (Student's t over seeds); bold if they "
            "exclude 0.",
        ],
    )


def difference_cell(spread: Spread | None) -> Cell:
    """The signed mean difference with its 95 % interval below it, with two digits of the deviation."""
    if spread is None:
        return Cell(text=MISSING)
    if spread.interval is None:
        return Cell(text=signed(spread.mean, decimals(spread.mean)), detail="n = 1")
    places = decimals(spread.deviation or spread.mean, 2)
    mean, low, high = (signed(value, places) for value in (spread.mean, *spread.interval))
    clear = spread.interval[0] > 0 or spread.interval[1] < 0
    detail = f"95 %: {low} … {high}, n = {spread.count}"
    return Cell(text=mean, detail=detail, kind="clear" if clear else "")


def headline_table(summary: Summary) -> Table:
    """The headline metric and the cost of training."""
    name = summary.headline
    best = summary.best(name)
    seconds = [group.spread("seconds") for group in summary.groups]
    times = durations([None if spread is None else spread.mean for spread in seconds])
    rows = [
        [
            name_cell(group),
            spread_cell(group.metric(name), summary.unit(name), best == group.label),
            plain_cell(group.spread("parameters"), quantity),
            plain_cell(group.spread("trained_tokens"), quantity),
            time,
            plain_cell(group.spread("tokens_per_second"), "{:,.0f}".format),
            plain_cell(group.spread("peak_mib"), "{:,.0f}".format),
        ]
        for group, time in zip(summary.groups, times, strict=True)
    ]
    cost = ("parameters", "trained tokens", "training time", "tokens/s", "peak MiB")
    columns = ["encoding", title_of(summary, name), *cost]
    return Table(title="Quality and cost", columns=columns, rows=rows, notes=[cost_note(summary)])


def cost_note(summary: Summary) -> str:
    """How cost was measured."""
    note = "Time, speed and memory are means over seeds and cover training only"
    shared = max(
        ((run.environment or {}).get("side_by_side", 1) for group in summary.groups for run in group.finished),
        default=1,
    )
    if shared == 1:
        return f"{note}."
    return f"{note}. Up to {shared} runs shared the machine, so each was slower than it would be on its own."


def runs_table(summary: Summary) -> Table:
    """Every run, with the reason of failures."""
    rows = []
    times = iter(durations([run.seconds for group in summary.groups for run in group.runs]))
    for group in summary.groups:
        for run in group.runs:
            final = run.log[-1] if run.log else None
            rows.append(
                [
                    Cell(text=group.label),
                    Cell(text=str(run.seed)),
                    Cell(text=run.status, kind="" if run.done else "failed"),
                    Cell(text=with_unit(run.metric(summary.headline), summary.unit(summary.headline))),
                    Cell(text=MISSING if final is None else f"{number(final[1])} at {final[0]:,}"),
                    next(times),
                    Cell(text=run.note, kind="words"),
                ]
            )
    headline = title_of(summary, summary.headline)
    columns = ["encoding", "seed", "status", headline, "last loss at step", "time", "note"]
    return Table(title="Every run", columns=columns, rows=rows)


def claims_table(summary: Summary) -> Table | None:
    """Published numbers next to ours; None if the recipe has none.

    Claims about a metric that the task does not compute get their own column, next to our headline.
    """
    claims: dict[str, dict[str, float]] = summary.results.claims
    metrics = list(dict.fromkeys(metric for values in claims.values() for metric in values))
    if not metrics:
        return None
    known = summary.names
    # which metrics the task computes is unknown until a run is finished
    foreign = [metric for metric in metrics if known and metric not in known]
    ours = [metric for metric in metrics if metric not in foreign]
    columns = [f"{readable(metric)}, {whose}" for metric in ours for whose in ("ours", "claimed")]
    columns += [f"{readable(metric)}, claimed{ARROWS[summary.higher_is_better(metric)]}" for metric in foreign]
    source = summary.results.claims_source or "the recipe names no source"
    notes = [f"Claimed: {source}. Claims were not measured here; model sizes and budgets may differ."]
    beside = bool(foreign) and not ours
    if foreign:
        names = " and ".join(map(readable, foreign))
        notes.append(f"Not measured here: {names}.")
    if beside:
        arrow = ARROWS[summary.higher_is_better(summary.headline)]
        columns.append(f"{readable(summary.headline)}, ours, a different metric{arrow}")
        notes.append(
            f"Our {readable(summary.headline)} is a different metric: compare only the order of the encodings."
        )
    groups = {group.label: group for group in summary.groups}
    rows = []
    for label in [*groups, *(label for label in claims if label not in groups)]:
        group = groups.get(label)
        row = [Cell(text=label, detail="not run here") if group is None else name_cell(group)]
        for metric in [*ours, *foreign]:
            if metric in ours:
                row.append(spread_cell(None if group is None else group.metric(metric), summary.unit(metric)))
            claimed = claims.get(label, {}).get(metric)
            row.append(Cell(text=with_unit(claimed, summary.unit(metric))))
        if beside:
            row.append(
                spread_cell(None if group is None else group.metric(summary.headline), summary.unit(summary.headline))
            )
        rows.append(row)
    return Table(title="Published numbers and ours", columns=["encoding", *columns], rows=rows, notes=notes)
