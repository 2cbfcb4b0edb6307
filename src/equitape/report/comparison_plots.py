"""The plots of a comparison: training loss, all curves and all heat maps."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..registry import counted
from ..runs.results import PERCENT, Curve, HeatMap
from .charts import Line, LinePanel, Mark, line_plot, log_bins, spans
from .heat_maps import score_maps, score_panel
from .numbers import number, readable
from .style import Plot, SeriesStyle, file_name, series_styles
from .summary import Group, Spread, Summary, curve_spreads, mean_grid

LOSS = "training-loss"
"""File name of the training-loss plot."""
MOST_LOSS_POINTS = 200
MOST_PLACES = 32
"""Curves over token positions with more points than this are binned."""
SHARES = ("match", "accuracy", "error")
BAND = "Lines are means over seeds; bands span the lowest to the highest seed."
BINS = "Positions are averaged in bins of equal width on the logarithmic axis."


def all_plots(summary: Summary) -> list[Plot]:
    """Loss, then all curves, then all heat maps."""
    loss = plot_loss(summary)
    plots = [] if loss is None else [loss]
    plots += [plot_curve(summary, title) for title in titles(summary, "curves")]
    return plots + [plot_heat_maps(summary, title) for title in titles(summary, "heat_maps")]


def styles_of(summary: Summary) -> dict[str, SeriesStyle]:
    """The style of every label."""
    return series_styles({group.label: group.kind for group in summary.groups})


def titles(summary: Summary, kind: str) -> list[str]:
    """Titles of the runs' "curves" or "heat_maps", in order of first appearance."""
    return list(dict.fromkeys(entry.title for group in summary.groups for entry in entries_of(group, kind)))


def entries_of(group: Group, kind: str, title: str | None = None) -> list[Any]:
    """The "curves" or "heat_maps" of a group; with a title, one per seed."""
    entries = [entry for run in group.finished if run.evaluation for entry in getattr(run.evaluation, kind)]
    return [entry for entry in entries if title in (None, entry.title)]


def spread_line(label: str, style: SeriesStyle, points: Sequence[tuple[float, Spread]]) -> Line:
    """A line through means, with a band from the lowest to the highest seed if there are several."""
    several = any(spread.count > 1 for _, spread in points)
    return Line(
        label=label,
        style=style,
        x=[x for x, _ in points],
        y=[spread.mean for _, spread in points],
        low=[spread.low for _, spread in points] if several else None,
        high=[spread.high for _, spread in points] if several else None,
    )


def band_caption(lines: Sequence[Line]) -> str:
    """The meaning of bands, if there are any."""
    return BAND if any(line.low is not None for line in lines) else ""


def loss_points(group: Group) -> list[tuple[float, Spread]]:
    """(step, losses over seeds), thinned to MOST_LOSS_POINTS by averaging neighbouring steps."""
    steps: dict[float, list[float]] = {}
    # failed runs are shown up to their last step
    for run in group.runs:
        known = [(step, loss) for step, loss in run.log if loss is not None and math.isfinite(loss)]
        width = math.ceil(len(known) / MOST_LOSS_POINTS) or 1
        for start in range(0, len(known), width):
            part = known[start : start + width]
            steps.setdefault(part[-1][0], []).append(math.fsum(loss for _, loss in part) / len(part))
    return [(step, Spread(values=tuple(steps[step]))) for step in sorted(steps)]


def plot_loss(summary: Summary) -> Plot | None:
    """Training loss against steps."""
    styles = styles_of(summary)
    lines = [
        spread_line(group.label, styles[group.label], points)
        for group in summary.groups
        if (points := loss_points(group))
    ]
    if not lines:
        return None
    last = "; ".join(f"{line.label} {number(line.y[-1])}" for line in lines)
    panel = LinePanel(x_label="step", y_label="training loss, nats per token", lines=lines, x_log=False, y_log_span=20)
    return line_plot(
        LOSS,
        "Training loss",
        [panel],
        alt=f"Line plot of training loss against step, mean over seeds. At the end: {last}.",
        caption=band_caption(lines),
    )


def plot_curve(summary: Summary, title: str) -> Plot:
    """A score against one property, such as perplexity against length."""
    styles = styles_of(summary)
    by_group = {group.label: entries_of(group, "curves", title) for group in summary.groups}
    every: list[Curve] = [curve for curves in by_group.values() for curve in curves]
    first, lines, described, binned = every[0], [], [], False
    share = is_share([value for curve in every for value in curve.y], first.y_label)
    for group in summary.groups:
        curves = by_group[group.label]
        if share:
            curves = [replace(curve, y=[y if y is None else 100 * y for y in curve.y]) for curve in curves]
        if is_by_position(first):
            curves, binned = [in_log_bins(curve) for curve in curves], True
        points = [(x, spread) for x, spread in curve_spreads(curves) if math.isfinite(spread.mean)]
        if points:
            lines.append(spread_line(group.label, styles[group.label], points))
            ends = [f"{number(spread.mean)} at {x:g}" for x, spread in (points[0], points[-1])]
            described.append(f"{group.label} {', '.join(ends)}")
    trained = summary.trained_up_to(first.x_label)
    marks = [] if trained is None else [Mark(x=trained, text="trained up to here")]
    means = f", mean over seeds: {'; '.join(described)}."
    return curve_plot(first, lines, marks, means, binned=binned, spread=band_caption(lines), share=share)


def curve_plot(
    curve: Curve,
    lines: Sequence[Line],
    marks: Sequence[Mark],
    summary: str,
    *,
    binned: bool,
    spread: str,
    share: bool = False,
) -> Plot:
    """The plot of one curve of several models.

    summary: ends its text alternative. spread: what bands or bars mean. share: the lines are in per cent.
    """
    panel = LinePanel(
        x_label=curve.x_label,
        y_label=f"{curve.y_label}, %" if share else curve.y_label,
        lines=lines,
        marks=marks,
        x_log=True if binned else None,
        y_log=False if share else None,
    )
    alt = f"Line plot of {curve.y_label} against {curve.x_label}{summary}"
    caption = " ".join(part for part in (spread, BINS if binned else "") if part)
    return line_plot(file_name("curve", curve.title), curve.title, [panel], alt=alt, caption=caption)


def is_share(values: Sequence[float | None], label: str) -> bool:
    """Whether these are fractions of a score that tables show in per cent."""
    known = [value for value in values if value is not None]
    return any(word in label for word in SHARES) and all(0 <= value <= 1 for value in known)


def is_by_position(curve: Curve) -> bool:
    """Whether a curve has a point per token position; its loss is noisy far from the start."""
    return "tokens" in curve.x_label and len(curve.x) > MOST_PLACES and spans(curve.x, 8)


def in_log_bins(curve: Curve) -> Curve:
    """A curve averaged in logarithmic bins of equal width."""
    places: list[float] = []
    values: list[float] = []
    for part in log_bins(curve.x):
        known = [curve.y[index] for index in part if curve.y[index] is not None]
        places.append(math.fsum(curve.x[index] for index in part) / len(part))
        values.append(math.fsum(known) / len(known) if known else math.nan)
    return replace(curve, x=places, y=values, low=None, high=None)


def plot_heat_maps(summary: Summary, title: str) -> Plot:
    """One panel per encoding with the mean over seeds, all on one scale."""
    by_group = {group.label: entries_of(group, "heat_maps", title) for group in summary.groups}
    every: list[HeatMap] = [entry for maps in by_group.values() for entry in maps]
    first, panels = every[0], []
    share = is_share([cell for entry in every for row in entry.values for cell in row], title)
    for label, maps in by_group.items():
        same = [entry for entry in maps if (entry.rows, entry.columns) == (maps[0].rows, maps[0].columns)]
        if not same:
            continue
        grid: NDArray[Any] = np.array(mean_grid([entry.values for entry in same])) * (100 if share else 1)
        frame, seeds = trained_corner(summary, same[0]), f", {counted(len(same), 'seed')}"
        panels.append(score_panel(label, grid, same[0], PERCENT if share else "", seeds, frame=frame))
    framed = any(panel.frame is not None for panel in panels)
    return score_maps(
        title,
        panels,
        first,
        limits=(0.0, 100.0) if share else None,
        upwards=True,
        value_label=f"{title}, %" if share else title,
        alt=(
            f"Heat maps of {readable(title)}{' in per cent' if share else ''} by {first.row_label} and "
            f"{first.column_label}, one per encoding, lighter is higher{', trained part framed' if framed else ''}. "
            f"Mean over all cells: {'; '.join(panel.described for panel in panels)}."
        ),
        caption=f"Means over seeds.{' The frame marks the trained range.' if framed else ''}",
    )


def trained_corner(summary: Summary, entry: HeatMap) -> tuple[int, int] | None:
    """(rows, columns) of a heat map covered by training; None if unknown."""
    rows, columns = summary.trained_up_to(entry.row_label), summary.trained_up_to(entry.column_label)
    if rows is None or columns is None:
        return None
    return sum(value <= rows for value in entry.rows), sum(value <= columns for value in entry.columns)
