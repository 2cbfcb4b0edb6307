"""The plots of a report: readable in greyscale (markers, line styles, viridis), each with a text that replaces it."""

import io
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from .summary import Group, Spread, Summary, curve_spreads, mean_grid
from .tables import number, readable

# told apart without colour; the colours are of middling lightness, to stand on white and on black. The numbers of
# markers, dashes and colours have no common divisor, so that a pair comes back only after 11 x 5 lines
MARKERS = "os^Dv<>P*Xd"
LINE_STYLES = ("-", "--", "-.", ":", (0, (6, 1, 1, 1, 1, 1)))
COLOURS = ("#1f77b4", "#d55e00", "#2a9d5c", "#b05fa8", "#8c6d1f", "#7f7f7f")
INK = "#161b22"
"""Text and axes; in SVG it becomes the colour of the text around it, so that one picture serves light and dark."""
PANELS_IN_A_ROW = 4
MOST_LOSS_POINTS = 200
MANY_DECADES = 1e4
STYLE = {
    "svg.fonttype": "none",
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


@dataclass(frozen=True, kw_only=True)
class Plot:
    """A picture: name is that of its file, alt tells what it shows to those who cannot see it."""

    name: str
    title: str
    alt: str
    svg: str
    png: bytes


@contextmanager
def figure_of(width: float, height: float) -> Iterator[Any]:
    """A matplotlib figure in the style of the report."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        yield Figure(figsize=(width, height), layout="constrained")


def finish(figure: Any, name: str, title: str, alt: str) -> Plot:
    """Draw a figure as SVG for the page and as PNG for a file."""
    import matplotlib

    svg, png = io.StringIO(), io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(svg, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        figure.savefig(png, format="png", dpi=120, facecolor="white", metadata={"Software": None})
    return Plot(name=name, title=title, alt=alt, svg=inline(svg.getvalue(), name), png=png.getvalue())


def inline(svg: str, prefix: str) -> str:
    """An SVG that may stand inside a page with others: no header, ids of its own, ink of the page."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{prefix}-', svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\1{prefix}-", svg)
    svg = svg.replace(INK, "currentColor")
    # the page scales pictures; a screen reader gets the text of the figure around it
    return re.sub(r"<svg ", '<svg aria-hidden="true" ', svg, count=1)


def line_style(summary: Summary, label: str) -> dict[str, Any]:
    """The same colour, marker and dashes for an encoding in every plot."""
    return numbered_style(summary.labels.index(label), label)


def numbered_style(index: int, label: str) -> dict[str, Any]:
    """Colour, marker and dashes of one line among several, apart in greyscale too."""
    return {
        "color": COLOURS[index % len(COLOURS)],
        "marker": MARKERS[index % len(MARKERS)],
        "linestyle": LINE_STYLES[index % len(LINE_STYLES)],
        "markersize": 5,
        "linewidth": 1.4,
        "label": label,
    }


def all_plots(summary: Summary) -> list[Plot]:
    """Loss, then every curve, then every heat map that any run has."""
    plots = []
    loss = plot_loss(summary)
    if loss is not None:
        plots.append(loss)
    plots += [plot_curve(summary, title) for title in titles(summary, "curves")]
    plots += [plot_heat_maps(summary, title) for title in titles(summary, "heat_maps")]
    return plots


def titles(summary: Summary, kind: str) -> list[str]:
    """Titles of the curves or heat maps that runs have, in the order of first appearance."""
    found = (
        entry["title"]
        for group in summary.groups
        for run in group.finished
        for entry in run["evaluation"].get(kind, [])
    )
    return list(dict.fromkeys(found))


def entries(group: Group, kind: str, title: str) -> list[dict[str, Any]]:
    """The curves or heat maps of one title, one a seed."""
    return [entry for run in group.finished for entry in run["evaluation"].get(kind, []) if entry["title"] == title]


def file_name(prefix: str, title: str) -> str:
    """A title as the name of a file."""
    return f"{prefix}-" + re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def draw_spreads(axes: Any, points: Sequence[tuple[float, Spread]], style: dict[str, Any]) -> None:
    """A line through the means and a band from the lowest to the highest seed."""
    x = [place for place, _ in points]
    # on long lines a few markers, and at other places for every line
    every = max(1, len(x) // 8)
    start = MARKERS.index(style["marker"]) * every // len(MARKERS)
    axes.plot(x, [spread.mean for _, spread in points], markevery=(start, every), **style)
    if any(spread.count > 1 for _, spread in points):
        low, high = [spread.low for _, spread in points], [spread.high for _, spread in points]
        axes.fill_between(x, low, high, color=style["color"], alpha=0.15, linewidth=0)


def make_logarithmic(axis: Any) -> None:
    """Ticks at 1, 2 and 5, or at powers of ten alone where there are many, written as plain numbers."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.axes.set_yscale("log")
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high / low < MANY_DECADES else (1.0,)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


def suits_logarithm(values: Sequence[float], ratio: float) -> bool:
    """Whether values are positive and span more than this ratio."""
    finite = [value for value in values if math.isfinite(value)]
    return bool(finite) and min(finite) > 0 and max(finite) / min(finite) >= ratio


def loss_points(group: Group) -> list[tuple[float, Spread]]:
    """The training loss over seeds by step, each the mean of neighbouring steps where there are very many."""
    steps: dict[float, list[float]] = {}
    # runs that failed are part of the picture up to the step where they did
    for run in group.runs:
        known = [(step, loss) for step, loss in run.get("log") or [] if loss is not None and math.isfinite(loss)]
        width = math.ceil(len(known) / MOST_LOSS_POINTS) or 1
        for start in range(0, len(known), width):
            part = known[start : start + width]
            steps.setdefault(part[-1][0], []).append(math.fsum(loss for _, loss in part) / len(part))
    return [(step, Spread(values=tuple(steps[step]))) for step in sorted(steps)]


def plot_loss(summary: Summary) -> Plot | None:
    """Training loss against steps."""
    curves = {group.label: points for group in summary.groups if (points := loss_points(group))}
    if not curves:
        return None
    with figure_of(7.5, 4.2) as figure:
        axes = figure.add_subplot()
        for label, points in curves.items():
            draw_spreads(axes, points, line_style(summary, label))
        axes.set(xlabel="step", ylabel="training loss")
        if suits_logarithm([spread.mean for points in curves.values() for _, spread in points], 20):
            make_logarithmic(axes.yaxis)
        finish_axes(figure, axes)
        last = "; ".join(f"{label} {number(points[-1][1].mean)}" for label, points in curves.items())
        alt = f"Line plot of training loss against step, mean over seeds. At the end: {last}."
        return finish(figure, "training-loss", "Training loss", alt)


def finish_axes(figure: Any, axes: Any) -> None:
    """A light grid, and the legend beside the plot, where it hides no line."""
    axes.grid(alpha=0.25, color=INK, linewidth=0.5)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right center", fontsize="small", handlelength=3.2)


def plot_curve(summary: Summary, title: str) -> Plot:
    """A score against one property, for example perplexity against length."""
    first = next(curve for group in summary.groups for curve in entries(group, "curves", title))
    with figure_of(7.5, 4.2) as figure:
        axes = figure.add_subplot()
        told: list[str] = []
        xs: set[float] = set()
        ys: list[float] = []
        for group in summary.groups:
            points = [
                (x, spread)
                for x, spread in curve_spreads(entries(group, "curves", title))
                if math.isfinite(spread.mean)
            ]
            if points:
                draw_spreads(axes, points, line_style(summary, group.label))
                xs.update(x for x, _ in points)
                ys += [spread.mean for _, spread in points]
                ends = [f"{number(spread.mean)} at {x:g}" for x, spread in (points[0], points[-1])]
                told.append(f"{group.label} {', '.join(ends)}")
        if suits_logarithm(sorted(xs), 8):
            axes.set_xscale("log", base=2)
        if suits_logarithm(ys, 10):
            make_logarithmic(axes.yaxis)
        if len(xs) <= 10:
            axes.set_xticks(sorted(xs), [f"{x:g}" for x in sorted(xs)])
            axes.xaxis.minorticks_off()
        mark_trained(axes, summary.trained_up_to(first["x_label"]), xs)
        axes.set(xlabel=first["x_label"], ylabel=first["y_label"])
        finish_axes(figure, axes)
        alt = f"Line plot of {first['y_label']} against {first['x_label']}, mean over seeds: {'; '.join(told)}."
        return finish(figure, file_name("curve", title), title, alt)


def mark_trained(axes: Any, trained: float | None, xs: set[float]) -> None:
    """A line where training ended."""
    if trained is None or not min(xs, default=0) <= trained <= max(xs, default=0):
        return
    axes.axvline(trained, color=INK, linewidth=1, linestyle=(0, (1, 3)), zorder=0)
    where = axes.get_xaxis_transform()
    axes.text(trained, 1.01, "trained up to here", transform=where, fontsize="x-small", ha="center", va="bottom")


def mark_trained_corner(axes: Any, entry: dict[str, Any], rows: float | None, columns: float | None) -> None:
    """A frame around the trained part of a heat map."""
    from matplotlib.patches import Rectangle

    if rows is None or columns is None:
        return
    height, width = (
        sum(value <= limit for value in entry[name]) for name, limit in (("rows", rows), ("columns", columns))
    )
    for colour, line in (("black", 2.4), ("white", 1.2)):
        frame = Rectangle((-0.5, -0.5), width, height, fill=False, edgecolor=colour, linewidth=line, clip_on=False)
        axes.add_patch(frame)


def plot_heat_maps(summary: Summary, title: str) -> Plot:
    """A panel for each encoding, the mean over seeds, all on one scale."""
    grids = {}
    for group in summary.groups:
        maps = entries(group, "heat_maps", title)
        same = [entry for entry in maps if (entry["rows"], entry["columns"]) == (maps[0]["rows"], maps[0]["columns"])]
        if same:
            grids[group.label] = (same[0], mean_grid([entry["values"] for entry in same]), len(same))
    cells = [cell for _, grid, _ in grids.values() for row in grid for cell in row if math.isfinite(cell)] or [0.0]
    low, high = (0.0, 1.0) if min(cells) >= 0 and max(cells) <= 1 else (min(cells), max(cells))
    lines = math.ceil(len(grids) / PANELS_IN_A_ROW)
    columns = math.ceil(len(grids) / lines)
    with figure_of(2.3 * columns + 1.1, 2.6 * lines + 0.4) as figure:
        panels, image, told, trained = [], None, [], []
        for index, (label, (entry, grid, count)) in enumerate(grids.items()):
            axes = figure.add_subplot(lines, columns, index + 1)
            # no seed has a number there
            axes.set_facecolor("#b0b0b0")
            image = axes.imshow(grid, vmin=low, vmax=high, cmap="viridis", origin="lower", interpolation="nearest")
            known = [cell for row in grid for cell in row if math.isfinite(cell)]
            mean = math.fsum(known) / len(known) if known else math.nan
            seeds = f"{count} seed{'s' if count > 1 else ''}"
            axes.set_title(f"{label}\nmean {mean:.3g}, {seeds}", fontsize="small")
            axes.tick_params(labelsize="small")
            label_ticks(axes.xaxis, entry["columns"])
            label_ticks(axes.yaxis, entry["rows"])
            axes.spines[:].set_visible(False)
            trained = [summary.trained_up_to(entry[name]) for name in ("row_label", "column_label")]
            mark_trained_corner(axes, entry, *trained)
            panels.append(axes)
            told.append(f"{label} {mean:.3g}")
        entry = next(iter(grids.values()))[0]
        figure.supxlabel(entry["column_label"], fontsize="small")
        figure.supylabel(entry["row_label"], fontsize="small")
        figure.colorbar(image, ax=panels, shrink=0.8, aspect=18)
        framed = "" if None in trained else ", the trained part framed"
        alt = (
            f"Heat maps of {readable(title)} by {entry['row_label']} and {entry['column_label']}, one an encoding, "
            f"lighter is higher{framed}. Mean over all cells: {'; '.join(told)}."
        )
        return finish(figure, file_name("map", title), title, alt)


def label_ticks(axis: Any, values: Sequence[int]) -> None:
    """At most six ticks that name what the rows or columns stand for."""
    every = max(1, math.ceil(len(values) / 6))
    places = list(range(every - 1, len(values), every)) if len(values) > 6 else list(range(len(values)))
    axis.set_ticks(places, [f"{values[place]:g}" for place in places])
