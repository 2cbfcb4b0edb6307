"""Heat maps: one per panel, on one or several scales."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..runs.results import HeatMap
from .charts import WHOLE_TICKS
from .numbers import with_unit
from .style import DIVERGING, NO_VALUE, SEQUENTIAL, Plot, figure_of, file_name, finish

MOST_CELL_NUMBERS = 12
"""Maximum columns of a heat map that shows the value of every cell."""
TITLE_CHARACTERS = 14
"""Per inch of a panel, in its title."""


@dataclass(frozen=True, kw_only=True)
class MapPanel:
    """One heat map. values [rows, columns], NaN if missing."""

    title: str
    values: NDArray[Any]
    row_ticks: Sequence[str] | None = None
    """Row labels; None counts along `extent`."""
    column_ticks: Sequence[str] | None = None
    extent: tuple[float, float, float, float] | None = None
    """(left, right, bottom, top) in axis units."""
    frame: tuple[int, int] | None = None
    """(rows, columns) of the corner to frame."""
    line_before: int | None = None
    """Draw a vertical line before this column."""
    described: str = ""
    """The panel in a few words, for the text alternative."""


def score_panel(name: str, values: NDArray[Any], scores: HeatMap, unit: str, note: str = "", **more: Any) -> MapPanel:
    """The panel of one encoding or model, titled with the mean of its cells."""
    known = values[np.isfinite(values)]
    mean = with_unit(float(known.mean()) if known.size else math.nan, unit)
    return MapPanel(
        title=f"{name}\nmean {mean}{note}",
        described=f"{name} {mean}",
        values=values,
        row_ticks=[str(value) for value in scores.rows],
        column_ticks=[str(value) for value in scores.columns],
        **more,
    )


@dataclass(frozen=True, kw_only=True)
class MapStyle:
    """Style of the heat maps of a plot."""

    row_label: str
    column_label: str
    scale: str = "linear"
    """"linear"; "root" for square roots from 0; "diverging" for square roots with white at zero."""
    limits: tuple[float, float] | None = None
    own_scales: bool = False
    """One scale per panel, instead of one for all."""
    upwards: bool = False
    """Put the first row at the bottom."""
    cell_numbers: bool = False
    columns: int = 4
    size: tuple[float, float] = (2.5, 2.8)
    aspect: str = "equal"
    whole_rows: bool = False
    value_label: str = ""
    notes: Sequence[str] = field(default_factory=tuple)


def heat_maps(
    name: str, title: str, panels: Sequence[MapPanel], style: MapStyle, *, alt: str, caption: str = ""
) -> Plot:
    """A plot with one heat map per panel, on one scale unless the style says otherwise."""
    rows = math.ceil(len(panels) / style.columns)
    columns = math.ceil(len(panels) / rows)
    shared = norm_of(np.concatenate([np.ravel(panel.values) for panel in panels]), style)
    with figure_of(style.size[0] * columns + 1.1, style.size[1] * rows + 0.4) as figure:
        drawn, image = [], None
        for index, panel in enumerate(panels):
            axes = figure.add_subplot(rows, columns, index + 1)
            norm = norm_of(panel.values, style) if style.own_scales else shared
            image = draw_map(axes, panel, style, norm)
            drawn.append(axes)
            if style.own_scales:
                add_colour_bar(figure, image, axes, style, norm)
        if not style.own_scales:
            add_colour_bar(figure, image, drawn, style, shared)
        figure.supxlabel(style.column_label, fontsize="small")
        figure.supylabel(style.row_label, fontsize="small")
        return finish(figure, name, title, alt, caption)


def score_maps(
    title: str, panels: Sequence[MapPanel], scores: HeatMap, *, alt: str, caption: str, **style: Any
) -> Plot:
    """A plot of panels made by `score_panel`, with the labels of their heat map. style: as in MapStyle."""
    chosen = MapStyle(row_label=scores.row_label, column_label=scores.column_label, **style)
    return heat_maps(file_name("map", title), title, panels, chosen, alt=alt, caption=caption)


def norm_of(values: NDArray[Any], style: MapStyle) -> Any:
    """The colour normalization; a diverging scale is symmetric around zero."""
    from matplotlib.colors import FuncNorm, Normalize, PowerNorm

    known = values[np.isfinite(values)]
    low, high = style.limits or ((float(known.min()), float(known.max())) if known.size else (0.0, 1.0))
    if style.scale == "linear":
        return Normalize(low, high if high > low else low + 1.0)
    reach = max(abs(low), abs(high)) or 1.0
    if style.scale == "root":
        return PowerNorm(0.5, 0.0, reach)
    return FuncNorm((lambda x: np.sign(x) * np.sqrt(np.abs(x)), lambda y: np.sign(y) * y**2), -reach, reach)


def draw_map(axes: Any, panel: MapPanel, style: MapStyle, norm: Any) -> Any:
    """Draw one panel; returns its image."""
    import matplotlib

    # not the colour of the axes, which pages leave out: their pictures are transparent
    colours = matplotlib.colormaps[DIVERGING if style.scale == "diverging" else SEQUENTIAL].with_extremes(bad=NO_VALUE)
    image = axes.imshow(
        panel.values,
        norm=norm,
        cmap=colours,
        origin="lower" if style.upwards else "upper",
        interpolation="nearest",
        aspect=style.aspect,
        extent=panel.extent,
    )
    axes.set_title(fit_lines(panel.title, int(TITLE_CHARACTERS * style.size[0])), fontsize="small")
    axes.tick_params(labelsize="x-small")
    axes.spines[:].set_visible(False)
    for axis, ticks in ((axes.xaxis, panel.column_ticks), (axes.yaxis, panel.row_ticks)):
        if ticks is not None:
            label_ticks(axis, ticks)
    if style.whole_rows:
        axes.yaxis.get_major_locator().set_params(**WHOLE_TICKS)
    if style.cell_numbers and panel.values.shape[1] <= MOST_CELL_NUMBERS:
        write_numbers(axes, panel.values, norm)
    if panel.frame is not None:
        frame_corner(axes, *panel.frame)
    if panel.line_before is not None and 0 < panel.line_before < panel.values.shape[1]:
        for colour, width in (("black", 3.0), ("white", 1.4)):
            axes.axvline(panel.line_before - 0.5, color=colour, linewidth=width)
    return image


def fit_lines(text: str, width: int) -> str:
    """Text in lines of at most so many characters where it can be broken: before @, after commas and spaces."""
    lines = []
    for line in text.splitlines():
        lines.append("")
        for piece in re.split(r"(?<=[, ])(?=.)|(?=@)", line):
            if lines[-1] and len((lines[-1] + piece).rstrip()) > width:
                lines.append("")
            lines[-1] += piece
    return "\n".join(line.rstrip() for line in lines)


def add_colour_bar(figure: Any, image: Any, axes: Any, style: MapStyle, norm: Any) -> None:
    """A colour bar next to its panels."""
    ticks = [norm.vmin, norm.vmin / 4, 0, norm.vmax / 4, norm.vmax] if style.scale == "diverging" else None
    bar = figure.colorbar(image, ax=axes, shrink=0.8, aspect=18, ticks=ticks, format="{x:.3g}")
    bar.ax.tick_params(labelsize="x-small")
    if style.value_label:
        bar.set_label(style.value_label, fontsize="x-small")


def label_ticks(axis: Any, values: Sequence[str]) -> None:
    """At most twelve ticks with row or column labels."""
    every = max(1, math.ceil(len(values) / 12))
    places = list(range(every - 1, len(values), every))
    rotation = 30 if axis.axis_name == "x" and sum(len(values[place]) for place in places) > 24 else 0
    axis.set_ticks(places, [values[place] for place in places], rotation=rotation)


def write_numbers(axes: Any, values: NDArray[Any], norm: Any) -> None:
    """The value of every cell, in a contrasting colour."""
    for (row, column), value in np.ndenumerate(values):
        if math.isfinite(value):
            ink = "black" if norm(value) > 0.55 else "white"
            axes.text(column, row, f"{value:.0f}", ha="center", va="center", fontsize="x-small", color=ink)


def frame_corner(axes: Any, rows: int, columns: int) -> None:
    """A frame around the first rows and columns."""
    from matplotlib.patches import Rectangle

    for colour, width in (("black", 2.4), ("white", 1.2)):
        axes.add_patch(
            Rectangle((-0.5, -0.5), columns, rows, fill=False, edgecolor=colour, linewidth=width, clip_on=False)
        )
