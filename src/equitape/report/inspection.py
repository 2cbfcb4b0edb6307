"""The HTML page of an inspection: self-contained, opens from disk without a server.

Values are rounded to 8 bits on the scale of their layer, compressed and base64-encoded; the page states this, and
hovering shows the rounded value. Maps that span orders of magnitude use a square-root scale, which keeps small values.
"""

import base64
import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..inspect.inspection import Array, Inspection
from ..inspect.stability import SLIGHT, UNCHANGED, Stability
from ..runs.files import write_text
from .numbers import number
from .pages import render
from .style import DIVERGING, SEQUENTIAL
from .tables import Cell, Table

LEVELS = 254
"""255 marks cells without a value."""
MISSING = 255
NUM_MIXERS = 10
FAINTEST = 1e-3
"""The change scale of a layer spans at least this fraction of the largest change in any layer."""
FOLLOWS = {
    "head": "Follows the layer and head sliders.",
    "group": "Follows the layer and head sliders; query heads that share a key-value head share the map.",
    "layer": "Follows the layer slider; the head slider does not change it.",
    "strip": "Shows all layers; the head slider does not change it.",
    "strip-group": "Shows all layers; follows the head slider.",
}
"""How the sliders affect a map."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Maps values to 0 .. 254: linear from low to high, or by square roots ("root" from 0, "signed" around 0)."""

    kind: str
    low: float
    high: float

    def encode(self, values: NDArray[Any]) -> NDArray[np.uint8]:
        """Rounded levels; 255 for NaN."""
        span = max(self.high - self.low, 1e-30)
        if self.kind == "linear":
            level = (values - self.low) / span
        elif self.kind == "root":
            level = np.sqrt(np.clip(values, 0, None) / max(self.high, 1e-30))
        else:
            level = 0.5 + 0.5 * np.sign(values) * np.sqrt(np.abs(values) / max(self.high, 1e-30))
        rounded = np.nan_to_num(np.rint(level * LEVELS), nan=0).clip(0, LEVELS).astype(np.uint8)
        return np.where(np.isnan(values), np.uint8(MISSING), rounded)


def linear_scale(values: NDArray[Any]) -> Scale:
    """From the smallest to the largest value; 0 to 1 without values."""
    known = values[~np.isnan(values)]
    low, high = (float(known.min()), float(known.max())) if known.size else (0.0, 1.0)
    return Scale(kind="linear", low=low, high=high if high > low else low + 1.0)


def root_scale(values: NDArray[Any]) -> Scale:
    """From 0 to the largest value."""
    return Scale(kind="root", low=0.0, high=largest(values))


def signed_scale(values: NDArray[Any]) -> Scale:
    """Symmetric around 0."""
    high = largest(np.abs(values))
    return Scale(kind="signed", low=-high, high=high)


def largest(values: NDArray[Any]) -> float:
    """The largest value; 1 without values or with zeros only."""
    known = values[~np.isnan(values)]
    return (float(known.max()) if known.size else 0.0) or 1.0


def pack(levels: NDArray[np.uint8]) -> str:
    """Bytes as compressed base64 text."""
    return base64.b64encode(zlib.compress(levels.tobytes(), 9)).decode("ascii")


def with_mean(values: NDArray[Any]) -> NDArray[Any]:
    """The mean of several heads before them. values [L, heads, ...]."""
    return np.concatenate((values.mean(1, keepdims=True), values), axis=1) if values.shape[1] > 1 else values


def map_entry(
    name: str,
    title: str,
    caption: str,
    values: NDArray[Any],
    scale: Callable[[NDArray[Any]], Scale],
    by: str,
    cells: str = "cells",
) -> dict[str, Any]:
    """A map per layer and head, packed on its layer's scale. values [L, heads, rows, columns].

    by: what selects the head: "head", "group" (a key-value head) or "layer" (all heads share the map).
    cells: the meaning of rows and columns: "cells", "samples" or "heads". With several heads, their mean comes first.
    """
    values = with_mean(values)
    shared = scale(values)
    scales = [scale(layer) for layer in values]
    if shared.kind == "signed":
        # a layer with rounding errors only stays white
        least = FAINTEST * shared.high
        scales = [replace(one, low=min(one.low, -least), high=max(one.high, least)) for one in scales]
    return {
        "name": name,
        "title": title,
        "caption": caption,
        "follows": FOLLOWS[by],
        "scales": [vars(one) for one in scales],
        "shared": vars(shared),
        "colours": DIVERGING if shared.kind == "signed" else SEQUENTIAL,
        "by": by,
        "cells": cells,
        "slices": int(values.shape[1]),
        "side": int(values.shape[2]),
        "data": [pack(one.encode(layer)) for one, layer in zip(scales, values, strict=True)],
    }


def maps_of(inspection: Inspection) -> list[dict[str, Any]]:
    """The maps that follow the sliders."""
    caption = "Weight of each key (column) for each query (row). Square-root colours."
    attention = inspection.past_only(inspection.attention)
    maps = [map_entry("attention", "Attention", caption, attention, root_scale, "head")]
    if inspection.attention_change is not None:
        title = "Attention minus attention with the frozen state"
        caption = "The frozen state is the initial one (RoPE, for TAPE); all weights are the same."
        change = inspection.past_only(inspection.attention_change)
        maps.append(map_entry("attention-change", title, caption, change, signed_scale, "head"))
    if inspection.products is not None:
        products = inspection.products[:, None]
        caption = "Sum over heads and frequencies of Re(conj z_i z_j); 1 is a token with itself in the initial state."
        maps.append(map_entry("products", "Products of states", caption, products, linear_scale, "layer"))
        if inspection.updates:
            title, caption = "Products minus initial products", "The change made by earlier layers."
            start = products[known_layers(products)[:1]]
            maps.append(map_entry("products-change", title, caption, products - start, signed_scale, "layer"))
    if inspection.distances is not None and inspection.updates:
        title = "Effective minus true distance"
        caption = "The distance at which plain rotary phasors match these best, minus the true one, in tokens."
        moved = inspection.distances - inspection.true_distances()
        maps.append(map_entry("distance", title, caption, moved, signed_scale, "group", "samples"))
    if inspection.mixing_mean is not None:
        caption = "T averaged over the text. Row: target head; column: source head. Complex values: modulus."
        mean = inspection.mixing_mean[:, None]
        maps.append(map_entry("mixing-mean", "Mean mixing matrix", caption, mean, signed_scale, "layer", "heads"))
    return maps


def known_layers(values: NDArray[Any]) -> list[int]:
    """Indices of the layers with values [L, ...]: those with an encoding of their own have no state to show."""
    return [index for index, layer in enumerate(values) if not np.isnan(layer).all()]


def strip_entry(name: str, title: str, caption: str, values: NDArray[Any], by: str) -> dict[str, Any]:
    """Layers by cells. values [L, heads, C]."""
    values = with_mean(values)
    scale = linear_scale(values)
    return {
        "name": name,
        "title": title,
        "caption": caption,
        "follows": FOLLOWS["strip" if by == "layer" else "strip-group"],
        "scale": vars(scale),
        "colours": SEQUENTIAL,
        "by": by,
        "slices": int(values.shape[1]),
        "columns": int(values.shape[2]),
        "data": pack(scale.encode(values)),
    }


def strips_of(inspection: Inspection) -> list[dict[str, Any]]:
    """Maps of all layers (rows) by all cells (columns)."""
    return [
        strip_entry(
            name, title, caption, inspection.pooled(values if values.ndim == 3 else values[:, None]),
            "group" if values.ndim == 3 else "layer",
        )
        for name, (title, caption, values) in strip_values(inspection).items()
    ]  # fmt: skip


def strip_values(inspection: Inspection) -> dict[str, tuple[str, str, Array]]:
    """(title, caption, values [L, G, N] or [L, N]) by name."""
    if not inspection.updates:
        return {}
    found = {
        "norms": (
            "Norm of the phasors",
            "Root mean square over frequencies; 1 for an initial rotary state.",
            # the rounding of float32 must not become colours
            None if inspection.norms is None else inspection.norms.round(6),
        ),
        "displacement": (
            "Phase displacement",
            "Mean over frequencies, in radians, relative to the initial state.",
            inspection.displacement,
        ),
        "mixing-strength": (
            "Strength of mixing",
            "Frobenius norm of the token's matrix T.",
            inspection.mixing_strength,
        ),
        "mixing-own": (
            "Token-specific part of mixing",
            "|T - mean| / (|T - mean| + |mean|): 0 if all tokens share one matrix, near 1 if they differ entirely.",
            inspection.mixing_own,
        ),
    }
    return {name: (title, text, values) for name, (title, text, values) in found.items() if values is not None}


def lookup_table(name: str) -> str:
    """256 colours as base64."""
    import matplotlib

    colours = (matplotlib.colormaps[name](np.linspace(0, 1, LEVELS + 1))[:, :3] * 255).round().astype(np.uint8)
    return base64.b64encode(colours.tobytes()).decode("ascii")


def page_data(inspection: Inspection) -> dict[str, Any]:
    """The data for the page's script."""
    return {
        "labels": inspection.labels,
        "cells": inspection.cells.bounds,
        "samples": [(index, index) for index in inspection.samples],
        "layers": inspection.num_layers,
        "heads": int(inspection.attention.shape[1]),
        "groups": int(inspection.norms.shape[1]) if inspection.norms is not None else 1,
        "maps": maps_of(inspection),
        "strips": strips_of(inspection),
        "lines": [{"title": title, "values": values} for title, values in inspection.by_layer().items()],
        "mixers": inspection.strongest_mixers(NUM_MIXERS),
        "colours": {name: lookup_table(name) for name in (SEQUENTIAL, DIVERGING)},
    }


def write_page(
    path: Path,
    inspection: Inspection,
    *,
    title: str,
    facts: Sequence[tuple[str, str]] = (),
    stability: Stability | None = None,
) -> None:
    """Write the page. facts: pairs to show at its end, such as versions and the command."""
    # only "</" and "<!--" could end a script element early
    data = json.dumps(page_data(inspection), separators=(",", ":")).replace("<", "\\u003c")
    text = render(
        "inspection.html.j2",
        title=title,
        inspection=inspection,
        data=data,
        script=Path(__file__).with_name("inspection.js").read_text(encoding="utf-8"),
        facts=list(facts),
        stability=stability,
        stability_tables=[] if stability is None else stability_tables(stability),
    )
    write_text(path, text)


def stability_tables(stability: Stability) -> list[Table]:
    """Changes of attention and states by layer, coloured by size, with a verdict per row."""
    tables = []
    for what, title in (("attention", "attention, x 0.01"), ("products", "products of states, %")):
        verdicts = what == "attention"
        layers = [f"layer {layer}" for layer in stability.shown_layers(what)]
        rows = []
        for change, values in stability.rows(what):
            cells = [
                Cell(text="") if value is None else Cell(text=number(100 * value, digits=2), kind=size_of(value))
                for value in values
            ]
            verdict = [Cell(text=change.verdict, kind=size_of(max(change.attention)))] if verdicts else []
            rows.append([Cell(text=change.model), Cell(text=change.disturbance, kind="words"), *verdict, *cells])
        if rows:
            columns = [title, "disturbance", *(["verdict"] if verdicts else []), *layers]
            tables.append(Table(title=title, columns=columns, rows=rows))
    return tables


def size_of(change: float) -> str:
    """The colour class of a change: "size-0" for rounding errors to "size-3" for more than 20 %."""
    return f"size-{sum(change > limit for limit in (UNCHANGED, SLIGHT, 0.2))}"
