"""Pictures of an evaluation: a heat map a grid, a line a model; readable in greyscale."""

import math
from pathlib import Path
from typing import Any

from ..report.plots import (
    COLOURS,
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

PANELS_IN_A_ROW = 3
MOST_NUMBERS = 12
"""Columns of a heat map up to which every cell says its value."""


def draw(reports: dict[str, dict[str, Any]], out: Path) -> list[Plot]:
    """One PNG for every curve and grid, models by their names together in each."""
    first = next(iter(reports.values()))
    plots = [draw_grids(reports, grid["title"]) for grid in first["grids"]]
    plots += [draw_curves(reports, curve["title"]) for curve in first["curves"]]
    for plot in plots:
        (out / f"{plot.name}.png").write_bytes(plot.png)
    return plots


def entries(reports: dict[str, dict[str, Any]], kind: str, title: str) -> dict[str, dict[str, Any]]:
    """The curve or grid of a title in every report that has it."""
    found = {name: [entry for entry in report[kind] if entry["title"] == title] for name, report in reports.items()}
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
    """A line for each model; where the first one's context ends is marked."""
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
        mark_trained(axes, next(iter(reports.values()))["model"]["context"], xs)
        axes.set(xlabel=first["x_label"], ylabel=first["y_label"])
        finish_axes(figure, axes)
        alt = f"Line plot of {first['y_label']} against {first['x_label']}: {'; '.join(told)}."
        return finish(figure, file_name("curve", title), title, alt)
