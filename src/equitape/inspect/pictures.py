"""The same views as PNG files: readable in greyscale, one scale over all panels unless states grow too much for it."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .look import Inspection
from .page import grows, lines_of, strips_of

PANELS = 6
MARKERS = "os^DvP"
WHOLE = {"integer": True, "min_n_ticks": 1}
"""Ticks of layers; with more of them asked for, a single layer would have fractions beside it."""


def chosen_layers(num_layers: int) -> list[int]:
    """The first, the last, and some evenly between them, as indices."""
    count = min(num_layers, PANELS)
    return sorted({round(index * (num_layers - 1) / max(count - 1, 1)) for index in range(count)})


def write_pictures(seen: Inspection, folder: Path) -> list[Path]:
    """Write what the encoding has to show; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []

    def save(figure: Any, name: str) -> None:
        figure.savefig(folder / name, dpi=120, facecolor="white")
        written.append(folder / name)

    pooled = f", cells of {seen.cells.block} tokens" if seen.cells.block > 1 else ""
    attention = seen.past_only(seen.attention.mean(1))
    save(draw_maps(seen, attention, f"Attention, mean of heads{pooled}", "root"), "attention.png")
    if seen.attention_change is not None:
        change = seen.past_only(seen.attention_change.mean(1))
        title = f"Attention minus that of the unmoved state, mean of heads{pooled}"
        save(draw_maps(seen, change, title, "signed"), "attention-change.png")
    if seen.products is not None:
        own = grows(seen.products)
        title = f"Products of positional states{pooled}{', each layer on its own scale' if own else ''}"
        save(draw_maps(seen, seen.products, title, "linear", own), "state-products.png")
    if seen.distances is not None and seen.updates:
        save(draw_distances(seen), "effective-distance.png")
    if seen.updates:
        save(draw_lines(seen), "layers.png")
        strips = draw_strips(seen)
        if strips is not None:
            save(strips, "tokens.png")
    return written


def new_figure(width: float, height: float) -> Any:
    """An empty matplotlib figure."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def token_extent(seen: Inspection) -> tuple[float, float]:
    """Where the first cell begins and the last ends, so that axes count tokens and not cells."""
    return seen.cells.first - 0.5, seen.cells.first + seen.cells.count - 0.5


def draw_maps(seen: Inspection, values: NDArray[Any], title: str, scale: str, own_scales: bool = False) -> Any:
    """A panel for each of some layers. values [L, C, C]; scale: "root", "signed" or "linear", as on the page;
    own_scales: a scale from the smallest to the largest value for each panel.
    """
    from matplotlib.colors import FuncNorm, Normalize, PowerNorm

    layers = chosen_layers(len(values))
    high = float(np.nanmax(np.abs(values))) or 1.0
    norm: Any = Normalize(float(np.nanmin(values)), float(np.nanmax(values)))
    if scale == "root":
        norm = PowerNorm(0.5, 0.0, high)
    if scale == "signed":
        norm = FuncNorm((lambda x: np.sign(x) * np.sqrt(np.abs(x)), lambda y: np.sign(y) * y**2), -high, high)
    columns = min(3, len(layers))
    figure = new_figure(2.9 * columns + 0.9, 2.9 * math.ceil(len(layers) / columns) + 0.4)
    start, end = token_extent(seen)
    panels, image = [], None
    for index, layer in enumerate(layers):
        axes = figure.add_subplot(math.ceil(len(layers) / columns), columns, index + 1)
        image = axes.imshow(
            values[layer],
            cmap="cividis" if scale == "signed" else "viridis",
            norm=None if own_scales else norm,
            interpolation="nearest",
            extent=(start, end, end, start),
        )
        axes.set_title(f"layer {layer + 1}", fontsize="small")
        axes.tick_params(labelsize="x-small")
        panels.append(axes)
        if own_scales:
            figure.colorbar(image, ax=axes, shrink=0.8, format="{x:.3g}").ax.tick_params(labelsize="x-small")
    ticks = [-high, -high / 4, 0, high / 4, high] if scale == "signed" else None
    if not own_scales:
        figure.colorbar(image, ax=panels, shrink=0.8, ticks=ticks, format="{x:.3g}")
    figure.suptitle(title, fontsize="medium")
    figure.supxlabel("key (token)", fontsize="small")
    figure.supylabel("query (token)", fontsize="small")
    return figure


def draw_distances(seen: Inspection) -> Any:
    """Effective against true distance, mean of heads and queries, a line for each of some layers."""
    assert seen.distances is not None
    true = seen.true_distances()
    figure = new_figure(5.6, 4.6)
    axes = figure.add_subplot()
    places = np.unique(true[~np.isnan(true)])
    axes.plot(places, places, color="0.6", linewidth=1, label="unmoved")
    for index, layer in enumerate(chosen_layers(seen.num_layers)[1:]):
        means = [float(np.nanmean(seen.distances[layer][:, true == place])) for place in places]
        every = max(1, len(places) // 8)
        axes.plot(places, means, marker=MARKERS[index % len(MARKERS)], markevery=(index, every), markersize=4,
                  linewidth=1, label=f"layer {layer + 1}")  # fmt: skip
    axes.set(xlabel="true distance, tokens", ylabel="effective distance, tokens, mean of heads")
    axes.grid(alpha=0.25)
    axes.legend(fontsize="small", frameon=False)
    return figure


def draw_lines(seen: Inspection) -> Any:
    """One number a layer, a panel for each kind."""
    lines = lines_of(seen)
    columns = min(3, len(lines))
    figure = new_figure(3.4 * columns, 2.3 * math.ceil(len(lines) / columns))
    for index, line in enumerate(lines):
        axes = figure.add_subplot(math.ceil(len(lines) / columns), columns, index + 1)
        values = [math.nan if value is None else value for value in line["values"]]
        axes.plot(range(1, len(values) + 1), values, marker="o", markersize=3, linewidth=1, color="0.15")
        axes.set_title(line["title"], fontsize="small")
        axes.tick_params(labelsize="x-small")
        axes.set_xlim(0.5, len(values) + 0.5)
        axes.xaxis.get_major_locator().set_params(**WHOLE)
        # zero is always in sight, so a line that hardly changes does not lie on the frame
        axes.update_datalim([(1, 0.0)])
        axes.autoscale_view(scalex=False)
        axes.grid(alpha=0.25)
    figure.supxlabel("layer", fontsize="small")
    return figure


def draw_strips(seen: Inspection) -> Any | None:
    """Layers by tokens: norms, displacement and mixing, means of heads; None where there are none of them."""
    titles = {entry["name"]: entry["title"] for entry in strips_of(seen)}
    values = {
        "norms": None if seen.norms is None else seen.norms.mean(1),
        "displacement": None if seen.displacement is None else seen.displacement.mean(1),
        "mixing-strength": seen.mixing_strength,
        "mixing-own": seen.mixing_own,
    }
    shown: Sequence[tuple[str, NDArray[Any]]] = [
        (titles[name], part) for name, part in values.items() if name in titles and part is not None
    ]
    if not shown:
        return None
    figure = new_figure(8.0, 1.9 * len(shown))
    for index, (title, part) in enumerate(shown):
        axes = figure.add_subplot(len(shown), 1, index + 1)
        extent = (*token_extent(seen), len(part) + 0.5, 0.5)
        image = axes.imshow(seen.pooled(part), cmap="viridis", aspect="auto", interpolation="nearest", extent=extent)
        axes.set_title(title, fontsize="small")
        axes.set_ylabel("layer", fontsize="small")
        axes.tick_params(labelsize="x-small")
        axes.yaxis.get_major_locator().set_params(**WHOLE)
        figure.colorbar(image, ax=axes, pad=0.01)
    figure.supxlabel("token", fontsize="small")
    return figure
