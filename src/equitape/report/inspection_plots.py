"""The views of an inspection as plot files: maps, distances, one number per layer, layers by tokens."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..inspect.inspection import Inspection
from .charts import Line, LinePanel, line_plot
from .heat_maps import MapPanel, MapStyle, heat_maps
from .inspection import known_layers, strip_values
from .numbers import number
from .style import MARKERS, Plot, SeriesStyle, series_styles, shade

PANELS = 6
MOST_GROWTH = 4.0
"""Layers share a scale if the widest range is at most this many times the narrowest."""


def chosen_layers(num_layers: int) -> list[int]:
    """Indices of the first, the last, and evenly spaced layers between them."""
    count = min(num_layers, PANELS)
    return sorted({round(index * (num_layers - 1) / max(count - 1, 1)) for index in range(count)})


def chosen_of(values: NDArray[Any]) -> list[int]:
    """`chosen_layers` of those that have values [L, ...]."""
    known = known_layers(values)
    return [known[index] for index in chosen_layers(len(known))]


def inspection_plots(inspection: Inspection) -> list[Plot]:
    """Attention and its change, state products, distances, one number per layer, layers by tokens."""
    pooled = f", cells of {inspection.cells.block} tokens" if inspection.cells.block > 1 else ""
    attention = inspection.past_only(inspection.attention.mean(1))
    plots = [plot_maps(inspection, "attention", f"Attention, mean of heads{pooled}", attention, "root")]
    if inspection.attention_change is not None:
        change = inspection.past_only(inspection.attention_change.mean(1))
        title = f"Attention minus attention with the frozen state, mean of heads{pooled}"
        plots.append(plot_maps(inspection, "attention-change", title, change, "diverging"))
    if inspection.products is not None:
        plots.append(
            plot_maps(
                inspection, "state-products", f"Products of positional states{pooled}", inspection.products, "linear"
            )
        )
    if inspection.updates:
        if inspection.distances is not None:
            plots.append(plot_distances(inspection))
        plots.append(plot_layers(inspection))
        plots += plot_strips(inspection)
    return plots


def grows(values: NDArray[Any]) -> bool:
    """Whether ranges of layers [L, ...] differ so much that one scale would show some in a single colour."""
    known = values[known_layers(values)]
    flat = known.reshape(len(known), -1)
    spans = np.nanmax(flat, 1) - np.nanmin(flat, 1)
    return bool(spans.max() > MOST_GROWTH * spans.min())


def token_extent(inspection: Inspection) -> tuple[float, float]:
    """Start of the first cell and end of the last, so that axes count tokens, not cells."""
    return inspection.cells.first - 0.5, inspection.cells.first + inspection.cells.count - 0.5


def plot_maps(inspection: Inspection, name: str, title: str, values: NDArray[Any], scale: str) -> Plot:
    """A panel for each of some layers. values [L, C, C]; scale: as in MapStyle.

    Products that grow from layer to layer have one scale per panel; difference maps share one.
    """
    own = scale == "linear" and grows(values)
    start, end = token_extent(inspection)
    panels = [
        MapPanel(title=f"layer {layer + 1}", values=values[layer], extent=(start, end, end, start))
        for layer in chosen_of(values)
    ]
    style = MapStyle(
        row_label="query (token)",
        column_label="key (token)",
        scale=scale,
        own_scales=own,
        columns=3,
        size=(2.9, 2.9),
    )
    return heat_maps(
        name,
        f"{title}{', one scale per layer' if own else ''}",
        panels,
        style,
        alt=f"Heat maps of {title[:1].lower()}{title[1:]} by query and key, one per layer.",
    )


def plot_distances(inspection: Inspection) -> Plot:
    """Effective against true distance, mean over heads and queries, one line for each of some layers."""
    assert inspection.distances is not None
    true = inspection.true_distances()
    places = np.unique(true[~np.isnan(true)])
    start = SeriesStyle(colour="#999999", dashes="--")
    lines = [Line(label="start", style=start, x=list(places), y=list(places))]
    layers = chosen_of(inspection.distances)[1:]
    base = series_styles({"model": inspection.encoding["kind"]})["model"].colour
    for index, layer in enumerate(layers):
        means = [float(np.nanmean(inspection.distances[layer][:, true == place])) for place in places]
        style = SeriesStyle(colour=shade(base, index, len(layers)), marker=MARKERS[index % len(MARKERS)])
        lines.append(Line(label=f"layer {layer + 1}", style=style, x=list(places), y=means))
    panel = LinePanel(
        x_label="true distance, tokens", y_label="effective distance, tokens", lines=lines, x_log=False, y_log=False
    )
    described = "; ".join(f"{line.label} {number(float(line.y[-1]))}" for line in lines)
    return line_plot(
        "effective-distance",
        "Effective distance, mean of heads",
        [panel],
        alt=f"Line plot of effective against true distance. At the largest distance: {described}.",
        size=(6.2, 4.6),
    )


def plot_layers(inspection: Inspection) -> Plot:
    """One number per layer, one panel per measure."""
    kind = inspection.encoding["kind"]
    style = series_styles({kind: kind})[kind]
    panels = []
    for title, values in inspection.by_layer().items():
        known = [math.nan if value is None else value for value in values]
        line = Line(label=kind, style=style, x=list(range(1, len(known) + 1)), y=known)
        panels.append(
            LinePanel(
                title=title, x_label="layer", y_label="", lines=[line], x_log=False, y_log=False, whole_x=True,
                zero=True, label_lines=False,
            )
        )  # fmt: skip
    return line_plot(
        "layers",
        "Measures by layer",
        panels,
        alt=f"Line plots by layer: {', '.join(panel.title for panel in panels)}.",
        size=(3.6, 2.5),
    )


def plot_strips(inspection: Inspection) -> list[Plot]:
    """Layers by tokens: norms, displacement and mixing, means over heads; empty if there are none."""
    start, end = token_extent(inspection)
    panels = []
    for title, _, values in strip_values(inspection).values():
        part = inspection.pooled(values.mean(1) if values.ndim == 3 else values)
        panels.append(MapPanel(title=title, values=part, extent=(start, end, len(part) + 0.5, 0.5)))
    if not panels:
        return []
    style = MapStyle(
        row_label="layer",
        column_label="token",
        own_scales=True,
        columns=1,
        size=(8.0, 1.9),
        aspect="auto",
        whole_rows=True,
    )
    alt = f"Heat maps by layer and token: {', '.join(panel.title for panel in panels)}."
    return [heat_maps("tokens", "States and mixing by layer and token", panels, style, alt=alt)]
