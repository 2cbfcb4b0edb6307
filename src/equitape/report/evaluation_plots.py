"""The plots of an evaluation: heat maps, curves and bars, each with all models."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from ..runs.results import PERCENT, Bars, Curve, EvaluationReport, HeatMap
from .charts import BarSeries, Line, Mark, bar_plot, bar_text
from .comparison_plots import curve_plot, in_log_bins, is_by_position
from .heat_maps import score_maps, score_panel
from .numbers import number
from .style import Plot, SeriesStyle, file_name, series_styles

Reports = dict[str, EvaluationReport]
"""Reports by model name."""
INTERVALS = "Bars are 95 % confidence intervals over documents."
MOST_ROWS = 60
"""Maximum rows of a bar chart."""
MOST_NAMES = 2
"""Maximum models named at a line where their context ends; more are counted."""


def evaluation_plots(reports: Reports) -> list[Plot]:
    """One plot per grid, curve and bar chart of the first report, with all models."""
    first = next(iter(reports.values()))
    plots = [plot_grids(reports, grid.title) for grid in first.grids]
    plots += [plot_curves(reports, curve.title) for curve in first.curves]
    return plots + [plot_bars(reports, bars.title) for bars in first.bars]


def styles_of(reports: Reports) -> dict[str, SeriesStyle]:
    """The style of every model, by its encoding if known."""
    return series_styles({name: (report.model.get("encoding") or {}).get("kind") for name, report in reports.items()})


Titled = TypeVar("Titled", HeatMap, Curve, Bars)


def entries(found: dict[str, list[Titled]], title: str) -> dict[str, Titled]:
    """The entry with this title of every model that has it."""
    kept = {name: next((entry for entry in given if entry.title == title), None) for name, given in found.items()}
    return {name: entry for name, entry in kept.items() if entry is not None}


def plot_grids(reports: Reports, title: str) -> Plot:
    """One panel per model, in per cent; grey if not measured."""
    grids = entries({name: report.grids for name, report in reports.items()}, title)
    first = next(iter(grids.values()))
    panels = []
    for name, grid in grids.items():
        values = np.array([[math.nan if cell is None else cell for cell in row] for row in grid.values], dtype=float)
        context = reports[name].model["context"]
        line = None if context is None else sum(int(column) <= context for column in grid.columns)
        panels.append(score_panel(name, values, grid, PERCENT, line_before=line))
    return score_maps(
        title,
        panels,
        first,
        limits=(0.0, 100.0),
        cell_numbers=True,
        columns=3,
        size=(1.2 + 0.36 * len(first.columns), 1.1 + 0.28 * len(first.rows)),
        aspect="auto",
        value_label="%",
        alt=(
            f"Heat maps of {title} by {first.row_label} and {first.column_label}, a line where a model's "
            f"context ends. Means: {'; '.join(panel.described for panel in panels)}."
        ),
        caption="A vertical line marks the end of the model's context; grey cells were not measured.",
    )


def plot_curves(reports: Reports, title: str) -> Plot:
    """One line per model, with the ends of contexts marked."""
    curves = entries({name: report.curves for name, report in reports.items()}, title)
    styles = styles_of(reports)
    first = next(iter(curves.values()))
    binned = is_by_position(first)
    lines, described = [], []
    for name, curve in curves.items():
        shown = in_log_bins(curve) if binned else curve
        spread = shown.low is not None and shown.high is not None
        columns = [shown.x, shown.y, shown.low or shown.y, shown.high or shown.y]
        points = [row for row in zip(*columns, strict=True) if row[1] is not None and math.isfinite(row[1])]
        if not points:
            continue
        xs, ys, low, high = zip(*points, strict=True)
        line = Line(label=name, style=styles[name], x=xs, y=ys)
        lines.append(replace(line, low=low, high=high, bars=True) if spread else line)
        described.append(f"{name} from {number(float(ys[0]))} to {number(float(ys[-1]))}")
    marks, ends = context_marks({name: reports[name].model["context"] for name in curves}, lines)
    meaning = INTERVALS if any(line.bars for line in lines) else ""
    return curve_plot(first, lines, marks, f": {'; '.join(described)}.{ends}", binned=binned, spread=meaning)


def context_marks(contexts: dict[str, int | None], lines: list[Line]) -> tuple[list[Mark], str]:
    """Marks at the ends of contexts, with model names if they differ; and the same as a sentence."""
    xs = [x for line in lines for x in line.x]
    low, high = (min(xs), max(xs)) if xs else (1, 0)
    inside = {name: length for name, length in contexts.items() if length is not None and low <= length <= high}
    if len(set(contexts.values())) == 1:
        return [Mark(x=length, text="trained up to here") for length in set(inside.values())], ""
    marks, described = [], []
    for length in sorted(set(inside.values())):
        names = [name for name, context in inside.items() if context == length]
        whose = ", ".join(names) if len(names) <= MOST_NAMES else f"{len(names)} models"
        marks.append(Mark(x=length, text=f"context of {whose}"))
        described.append(f"{length} of {', '.join(names)}")
    return marks, f" Lines where contexts end: {'; '.join(described)}." if described else ""


def plot_bars(reports: Reports, title: str) -> Plot:
    """One bar per model in every row."""
    bars = entries({name: report.bars for name, report in reports.items()}, title)
    styles = styles_of(reports)
    first = next(iter(bars.values()))
    every = list(dict.fromkeys(row for entry in bars.values() for row in entry.rows))
    rows = every[:MOST_ROWS]
    series = [
        BarSeries(
            label=name,
            style=styles[name],
            values=known_by_row(entry, entry.values, rows),
            errors=known_by_row(entry, entry.errors, rows),
            counts=known_by_row(entry, entry.counts, rows),
        )
        for name, entry in bars.items()
    ]
    described = "; ".join(
        f"{one.label}: {', '.join(f'{row} {bar_text(one, row)}' for row in rows if row in one.values)}"
        for one in series
    )
    left_out = f" Shows the first {len(rows)} of {len(every)} rows." if len(rows) < len(every) else ""
    return bar_plot(
        file_name("bars", title),
        title,
        series,
        rows,
        value_label=first.value_label,
        row_label=first.row_label,
        most=first.most,
        alt=f"Bar chart of {first.value_label} by {first.row_label}. {described}.{left_out}",
        caption=bars_caption(series),
    )


def bars_caption(series: list[BarSeries]) -> str:
    """The meaning of error bars and numbers in brackets, if there are any."""
    parts = []
    if any(one.errors for one in series):
        parts.append("Error bars are standard errors.")
    if any(one.counts for one in series):
        parts.append("Numbers in brackets count examples.")
    return " ".join(parts)


def known_by_row(bars: Bars, given: Sequence[float | None] | None, rows: list[str]) -> dict[str, Any]:
    """The existing values, errors or counts by row."""
    found = zip(bars.rows, given or [], strict=False)
    return {row: value for row, value in found if value is not None and not math.isnan(value) and row in rows}
