"""Plot makers: lines with spreads, and bars, in one or several panels."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .numbers import number
from .style import INK, MARKERS, EndLabel, Plot, SeriesStyle, figure_of, finish, label_ends

PANEL_SIZE = 7.5, 4.2
MOST_COLUMNS = 3
MANY_DECADES = 1e4
ROUND_STEPS = (1.0, 2.0, 5.0)
MOST_TICKS = 10
"""Maximum number of distinct x values that each get a tick."""
WHOLE_TICKS = {"integer": True, "min_n_ticks": 1}
"""Ticks of layers; more would give a single layer fractional ticks."""
TICK = "{x:,.10g}"
"""Format of tick labels: 0.5, 512, 1,048,576."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One series, with a spread around it if `low` and `high` are set."""

    label: str
    style: SeriesStyle
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    bars: bool = False
    """Show the spread as error bars instead of a band."""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A vertical line with a label above it."""

    x: float
    text: str


@dataclass(frozen=True, kw_only=True)
class LinePanel:
    """Axes with lines. Scales are logarithmic if values span a wide range, unless `x_log` or `y_log` is set."""

    x_label: str
    y_label: str
    lines: Sequence[Line]
    title: str = ""
    marks: Sequence[Mark] = ()
    x_log: bool | None = None
    y_log: bool | None = None
    y_log_span: float = 10
    whole_x: bool = False
    zero: bool = False
    """Include zero in the y axis."""
    label_lines: bool = True


def line_plot(
    name: str,
    title: str,
    panels: Sequence[LinePanel],
    *,
    alt: str,
    caption: str = "",
    size: tuple[float, float] = PANEL_SIZE,
) -> Plot:
    """A plot of one or several line panels; size: of a panel, in inches."""
    with line_figure(panels, size=size) as figure:
        return finish(figure, name, title, alt, caption)


@contextmanager
def line_figure(panels: Sequence[LinePanel], *, size: tuple[float, float] = PANEL_SIZE) -> Iterator[Any]:
    """A matplotlib figure of line panels; size: of a panel, in inches."""
    columns = max(min(MOST_COLUMNS, len(panels)), 1)
    rows = max(math.ceil(len(panels) / columns), 1)
    with figure_of(size[0] * columns, size[1] * rows) as figure:
        drawn = []
        for index, panel in enumerate(panels):
            axes = figure.add_subplot(rows, columns, index + 1)
            drawn.append((axes, draw_panel(axes, panel)))
        # place labels once all panels have their size
        for axes, labels in drawn:
            label_ends(axes, labels)
        yield figure


def draw_panel(axes: Any, panel: LinePanel) -> list[EndLabel]:
    """Draw the lines of a panel; returns the labels to place at their ends."""
    labels = []
    for index, line in enumerate(panel.lines):
        draw_line(axes, line, index, 0.15 if len(panel.lines) <= 4 else 0.09)
        last = max((place for place, y in enumerate(line.y) if math.isfinite(y)), default=None)
        if last is not None and panel.label_lines:
            labels.append(EndLabel(text=line.label, x=line.x[last], y=line.y[last], colour=line.style.colour))
    xs = sorted({x for line in panel.lines for x in line.x})
    ys = [
        y
        for line in panel.lines
        for values in (line.y, line.low or (), line.high or ())
        for y in values
        if y is not None and math.isfinite(y)
    ]
    if panel.x_log if panel.x_log is not None else spans(xs, 8):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(TICK)
    if panel.y_log if panel.y_log is not None else spans(ys, panel.y_log_span):
        make_logarithmic(axes, ys)
    if panel.whole_x:
        axes.set_xlim(min(xs) - 0.5, max(xs) + 0.5)
        axes.xaxis.get_major_locator().set_params(**WHOLE_TICKS)
    elif 0 < len(xs) <= MOST_TICKS:
        axes.set_xticks(xs, [TICK.format(x=x) for x in xs])
        axes.xaxis.minorticks_off()
        if len(xs) == 1 and axes.get_xscale() == "log":
            axes.set_xlim(xs[0] / 2, xs[0] * 2)
    if panel.zero:
        # including zero keeps a nearly constant line off the frame
        axes.update_datalim([(xs[0], 0.0)])
        axes.autoscale_view(scalex=False)
    draw_marks(axes, [mark for mark in panel.marks if xs and xs[0] <= mark.x <= xs[-1]])
    axes.set(xlabel=panel.x_label, ylabel=panel.y_label)
    if panel.title:
        axes.set_title(panel.title, fontsize="medium")
    axes.grid(alpha=0.25, color=INK, linewidth=0.5)
    return labels


def draw_line(axes: Any, line: Line, index: int, opacity: float = 0.15) -> None:
    """A line with its band or error bars. Long lines have few markers, at different places per line."""
    every = max(1, len(line.x) // 8)
    start = index % len(MARKERS) * every // len(MARKERS)
    axes.plot(list(line.x), list(line.y), markevery=(start, every), label=line.label, **line.style.of_line())
    if line.low is None or line.high is None:
        return
    if line.bars:
        errors = [
            [max(y - low, 0.0) for y, low in zip(line.y, line.low, strict=True)],
            [max(high - y, 0.0) for y, high in zip(line.y, line.high, strict=True)],
        ]
        axes.errorbar(
            list(line.x), list(line.y), yerr=errors, fmt="none", ecolor=line.style.colour, elinewidth=0.9, capsize=2.5
        )
    else:
        axes.fill_between(
            list(line.x), list(line.low), list(line.high), color=line.style.colour, alpha=opacity, linewidth=0
        )


def draw_marks(axes: Any, marks: Sequence[Mark]) -> None:
    """Dotted vertical lines, each with its label in a row above the axes."""
    for row, mark in enumerate(sorted(marks, key=lambda mark: mark.x)):
        axes.axvline(mark.x, color=INK, linewidth=1, linestyle=(0, (1, 3)), zorder=0)
        axes.text(
            mark.x,
            # one row per label: neighbouring lines are closer than their labels are wide
            1.01 + 0.045 * row,
            mark.text,
            transform=axes.get_xaxis_transform(),
            fontsize="x-small",
            ha="center",
            va="bottom",
        )


def spans(values: Sequence[float], times: float) -> bool:
    """Whether positive values span enough for a logarithmic axis."""
    known = [value for value in values if math.isfinite(value)]
    return len(known) > 1 and min(known) > 0 and max(known) >= times * min(known)


def make_logarithmic(axes: Any, values: Sequence[float]) -> None:
    """A logarithmic y axis with plain numbers at 1, 2 and 5, or at powers of ten if there are many.

    Limits are the round numbers around all values, so that at least two ticks show.
    """
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_yscale("log")
    low, high = round_limits(values)
    if high / low <= 20:
        axes.set_ylim(low, high)
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=ROUND_STEPS if high / low < MANY_DECADES else (1.0,)))
    axes.yaxis.set_major_formatter(TICK)
    axes.yaxis.set_minor_formatter(NullFormatter())


def round_limits(values: Sequence[float]) -> tuple[float, float]:
    """The nearest of 1, 2, 5, 10, 20, ... below and above all values."""
    powers = range(math.floor(math.log10(min(values))) - 1, math.ceil(math.log10(max(values))) + 2)
    steps = [step * 10.0**power for power in powers for step in ROUND_STEPS]
    return max(step for step in steps if step < min(values)), min(step for step in steps if step > max(values))


def log_bins(x: Sequence[float], count: int = 24) -> list[list[int]]:
    """Indices of increasing positive positions in logarithmic bins of equal width; empty bins are dropped."""
    places = np.log(np.asarray(x, dtype=np.float64))
    edges = np.linspace(places[0], places[-1], count + 1)[1:-1]
    bins: dict[int, list[int]] = {}
    for index, bin_index in enumerate(np.searchsorted(edges, places, side="right")):
        bins.setdefault(int(bin_index), []).append(index)
    return list(bins.values())


@dataclass(frozen=True, kw_only=True)
class BarSeries:
    """The bars of one model by row; missing rows are skipped."""

    label: str
    style: SeriesStyle
    values: dict[str, float]
    errors: dict[str, float] = field(default_factory=dict)
    counts: dict[str, float] = field(default_factory=dict)


def bar_plot(
    name: str,
    title: str,
    series: Sequence[BarSeries],
    rows: Sequence[str],
    *,
    value_label: str,
    row_label: str,
    most: float | None = None,
    alt: str,
    caption: str = "",
) -> Plot:
    """One bar per series in every row, with its value after it. most: the maximum possible value, if known."""
    thick = 0.8 / len(series)
    with figure_of(7.5, 1.0 + len(rows) * (0.2 + 0.2 * len(series))) as figure:
        axes = figure.add_subplot()
        for index, one in enumerate(series):
            places = {
                row: place + (index - (len(series) - 1) / 2) * thick
                for place, row in enumerate(rows)
                if row in one.values
            }
            axes.barh(
                list(places.values()),
                [one.values[row] for row in places],
                height=0.9 * thick,
                xerr=[one.errors.get(row, 0.0) for row in places] if one.errors else None,
                error_kw={"ecolor": INK, "elinewidth": 1, "capsize": 2},
                color=one.style.colour,
                hatch=one.style.hatch if len(series) > 1 else "",
                edgecolor="white",
                label=one.label,
            )
            for row, place in places.items():
                end = max(one.values[row] + one.errors.get(row, 0.0), 0.0)
                axes.text(end, place, f" {bar_text(one, row)}", va="center", fontsize="x-small")
        axes.set_yticks(range(len(rows)), rows, fontsize="small")
        axes.invert_yaxis()
        reached = [value for one in series for value in one.values.values()]
        # small values keep their own scale: on the full scale they would look equal
        if most is not None and most / 3 < max(reached, default=0.0) <= most:
            axes.set_xlim(0, most)
        axes.set(xlabel=value_label, ylabel=row_label)
        axes.set_axisbelow(True)
        axes.grid(axis="x", alpha=0.25, color=INK, linewidth=0.5)
        if len(series) > 1:
            figure.legend(loc="outside right center", fontsize="small")
        return finish(figure, name, title, alt, caption)


def bar_text(series: BarSeries, row: str) -> str:
    """The value of a bar, with the number of examples if known."""
    return number(series.values[row]) + (f" ({series.counts[row]})" if series.counts else "")
