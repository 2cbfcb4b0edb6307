"""Pictures of an evaluation: a heat map a grid, a line or a bar a model; readable in greyscale."""

import math
from pathlib import Path
from typing import Any

from ..report.plots import (
    COLOURS,
    INK,
    LINE_STYLES,
    MARKERS,
    Plot,
    figure_of,
    file_name,
    finish,
    finish_axes,
    make_logarithmic,
    mark_trained,
    suits_logarithm,
)
from ..report.tables import number

HATCHES = ("", "////", "....", "\\\\\\\\", "xxxx")
"""Of bars, which have neither markers nor dashes to tell them apart without colour."""
MOST_ROWS = 60
"""Of bars in a picture; more cannot be read."""
PANELS_IN_A_ROW = 3
MOST_NAMES = 2
"""Of models at a line where their context ends; more are counted."""
MOST_NUMBERS = 12
"""Columns of a heat map up to which every cell says its value."""


def draw(reports: dict[str, dict[str, Any]], out: Path) -> list[Plot]:
    """One PNG for every curve, grid and set of bars, models by their names together in each."""
    first = next(iter(reports.values()))
    plots = [draw_grids(reports, grid["title"]) for grid in first["grids"]]
    plots += [draw_curves(reports, curve["title"]) for curve in first["curves"]]
    # reports of earlier versions have none
    plots += [draw_bars(reports, bars["title"]) for bars in first.get("bars", [])]
    for plot in plots:
        (out / f"{plot.name}.png").write_bytes(plot.png)
    return plots


def entries(reports: dict[str, dict[str, Any]], kind: str, title: str) -> dict[str, dict[str, Any]]:
    """The curve, grid or set of bars of a title in every report that has it."""
    found = {
        name: [entry for entry in report.get(kind, []) if entry["title"] == title] for name, report in reports.items()
    }
    return {name: kept[0] for name, kept in found.items() if kept}


def draw_grids(reports: dict[str, dict[str, Any]], title: str) -> Plot:
    """A panel for each model, per cent from dark to light; grey where nothing was measured."""
    grids = entries(reports, "grids", title)
    lines = math.ceil(len(grids) / PANELS_IN_A_ROW)
    columns = math.ceil(len(grids) / lines)
    first = next(iter(grids.values()))
    width = 1.6 + 0.5 * len(first["columns"])
    with figure_of(width * columns + 1.2, (1.2 + 0.32 * len(first["rows"])) * lines + 0.4) as figure:
        panels, image, told = [], None, []
        for index, (name, grid) in enumerate(grids.items()):
            axes = figure.add_subplot(lines, columns, index + 1)
            values = [[math.nan if cell is None else cell for cell in row] for row in grid["values"]]
            axes.set_facecolor("#b0b0b0")
            image = axes.imshow(values, vmin=0, vmax=100, cmap="viridis", interpolation="nearest", aspect="auto")
            known = [cell for row in values for cell in row if math.isfinite(cell)]
            average = math.fsum(known) / len(known) if known else math.nan
            axes.set_title(f"{name}, mean {average:.1f}", fontsize="small")
            axes.set_xticks(range(len(grid["columns"])), grid["columns"], fontsize="x-small", rotation=30)
            axes.set_yticks(range(len(grid["rows"])), grid["rows"], fontsize="x-small")
            axes.spines[:].set_visible(False)
            if len(grid["columns"]) <= MOST_NUMBERS:
                write_numbers(axes, values)
            mark_context(axes, grid["columns"], reports[name]["model"]["context"])
            panels.append(axes)
            told.append(f"{name} {average:.1f}")
        figure.supxlabel(first["column_label"], fontsize="small")
        figure.supylabel(first["row_label"], fontsize="small")
        figure.colorbar(image, ax=panels, shrink=0.8, aspect=18)
        alt = (
            f"Heat maps of {title} by {first['row_label']} and {first['column_label']}, a line where a model's "
            f"context ends. Means: {'; '.join(told)}."
        )
        return finish(figure, file_name("map", title), title, alt)


def mark_context(axes: Any, columns: list[str], context: int | None) -> None:
    """A line between the lengths that a model is meant for and those beyond."""
    inside = sum(int(column) <= context for column in columns) if context is not None else 0
    if 0 < inside < len(columns):
        for colour, width in (("black", 3.0), ("white", 1.4)):
            axes.axvline(inside - 0.5, color=colour, linewidth=width)


def write_numbers(axes: Any, values: list[list[float]]) -> None:
    """Every cell's value, in the ink that shows on it."""
    for row, line in enumerate(values):
        for column, value in enumerate(line):
            if math.isfinite(value):
                ink = "black" if value > 55 else "white"
                axes.text(column, row, f"{value:.0f}", ha="center", va="center", fontsize="x-small", color=ink)


def draw_curves(reports: dict[str, dict[str, Any]], title: str) -> Plot:
    """A line for each model; where contexts end is marked."""
    curves = entries(reports, "curves", title)
    first = next(iter(curves.values()))
    xs: set[float] = set()
    ys: list[float] = []
    told = []
    with figure_of(7.5, 4.2) as figure:
        axes = figure.add_subplot()
        for index, (name, curve) in enumerate(curves.items()):
            points = [(x, y) for x, y in zip(curve["x"], curve["y"], strict=True) if y is not None]
            axes.plot(
                *zip(*points, strict=True),
                color=COLOURS[index % len(COLOURS)],
                marker=MARKERS[index % len(MARKERS)],
                linestyle=LINE_STYLES[index % len(LINE_STYLES)],
                markersize=4,
                markevery=max(1, len(points) // 10),
                linewidth=1.4,
                label=name,
            )
            xs.update(x for x, _ in points)
            ys += [y for _, y in points]
            told.append(f"{name} from {points[0][1]:.4g} to {points[-1][1]:.4g}")
        if suits_logarithm(sorted(xs), 8):
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:g}")
        if suits_logarithm(ys, 10):
            make_logarithmic(axes.yaxis)
        ends = mark_contexts(axes, {name: reports[name]["model"]["context"] for name in curves}, xs)
        axes.set(xlabel=first["x_label"], ylabel=first["y_label"])
        finish_axes(figure, axes)
        alt = f"Line plot of {first['y_label']} against {first['x_label']}: {'; '.join(told)}.{ends}"
        return finish(figure, file_name("curve", title), title, alt)


def mark_contexts(axes: Any, contexts: dict[str, int | None], xs: set[float]) -> str:
    """A line where training ended; one for each length, with whose it is, where models differ.

    Returns the latter in words.
    """
    if len(set(contexts.values())) == 1:
        mark_trained(axes, next(iter(contexts.values())), xs)
        return ""
    lengths = sorted({length for length in contexts.values() if length is not None and min(xs) <= length <= max(xs)})
    told = []
    for line, length in enumerate(lengths):
        names = [name for name, context in contexts.items() if context == length]
        whose = ", ".join(names) if len(names) <= MOST_NAMES else f"{len(names)} models"
        axes.axvline(length, color=INK, linewidth=1, linestyle=(0, (1, 3)), zorder=0)
        axes.text(
            length,
            # each label on a line of its own: neighbouring lengths are closer than words are wide
            1.01 + 0.04 * line,
            f"context of {whose}",
            transform=axes.get_xaxis_transform(),
            fontsize="x-small",
            ha="center",
            va="bottom",
        )
        told.append(f"{length} of {', '.join(names)}")
    return f" Lines where contexts end: {'; '.join(told)}." if told else ""


def draw_bars(reports: dict[str, dict[str, Any]], title: str) -> Plot:
    """A bar for each model in every row, its value written behind it."""
    bars = entries(reports, "bars", title)
    first = next(iter(bars.values()))
    every = list(dict.fromkeys(row for entry in bars.values() for row in entry["rows"]))
    rows = every[:MOST_ROWS]
    thick = 0.8 / len(bars)
    told: list[str] = []
    reached: list[float] = []
    with figure_of(7.5, 1.0 + len(rows) * (0.2 + 0.2 * len(bars))) as figure:
        axes = figure.add_subplot()
        for index, (name, entry) in enumerate(bars.items()):
            values, errors, counts = (known_by_row(entry, what) for what in ("values", "errors", "counts"))
            places = {row: rows.index(row) + (index - (len(bars) - 1) / 2) * thick for row in rows if row in values}
            axes.barh(
                list(places.values()),
                [values[row] for row in places],
                height=0.9 * thick,
                xerr=[errors.get(row, 0.0) for row in places] if errors else None,
                error_kw={"ecolor": INK, "elinewidth": 1, "capsize": 2},
                color=COLOURS[index % len(COLOURS)],
                hatch=HATCHES[index % len(HATCHES)],
                edgecolor="white",
                label=name,
            )
            texts = {row: number(values[row]) + (f" ({counts[row]})" if counts else "") for row in places}
            for row, place in places.items():
                end = max(values[row] + errors.get(row, 0.0), 0.0)
                axes.text(end, place, f" {texts[row]}", va="center", fontsize="x-small")
            reached += values.values()
            told.append(f"{name}: {', '.join(f'{row} {text}' for row, text in texts.items())}")
        axes.set_yticks(range(len(rows)), rows, fontsize="small")
        # the first row on top
        axes.invert_yaxis()
        if first["most"] is not None and max(reached, default=0.0) <= first["most"]:
            axes.set_xlim(0, first["most"])
        axes.set(xlabel=first["value_label"], ylabel=first["row_label"])
        finish_axes(figure, axes)
        axes.set_axisbelow(True)
        axes.grid(visible=False, axis="y")
        left_out = f" The first {len(rows)} of {len(every)} rows." if len(rows) < len(every) else ""
        alt = f"Bar chart of {first['value_label']} by {first['row_label']}. {'; '.join(told)}.{left_out}"
        return finish(figure, file_name("bars", title), title, alt)


def known_by_row(bars: dict[str, Any], what: str) -> dict[str, float]:
    """The values or errors that there are, by their rows."""
    given = bars[what] or []
    return {row: value for row, value in zip(bars["rows"], given, strict=False) if value is not None}
