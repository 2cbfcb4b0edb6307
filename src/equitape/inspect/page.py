"""One HTML page about an inspection: opens from disk, holds all of its data, asks no server for anything.

Values are rounded to 8 bits before they are packed (compressed, then base64); the page says so, and hovering shows the
rounded value. Maps that reach over orders of magnitude are rounded on a square-root scale, which spares the small ones.
"""

import base64
import json
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .certificate import Certificate
from .look import Inspection
from .stability import Stability

LEVELS = 254
"""255 marks cells without a value."""
MISSING = 255
NUM_MIXERS = 10
MOST_GROWTH = 4.0
"""Layers share a scale as long as the widest spans at most this many times the narrowest."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """From values to 0 .. 254: linear between low and high, or by square roots ("root" from 0, "signed" around 0)."""

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
    """Between the smallest and the largest value."""
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    return Scale(kind="linear", low=low, high=high if high > low else low + 1.0)


def root_scale(values: NDArray[Any]) -> Scale:
    """From 0 to the largest value."""
    return Scale(kind="root", low=0.0, high=float(np.nanmax(values)) or 1.0)


def signed_scale(values: NDArray[Any]) -> Scale:
    """As far below 0 as above."""
    high = float(np.nanmax(np.abs(values))) or 1.0
    return Scale(kind="signed", low=-high, high=high)


def grows(products: NDArray[Any]) -> bool:
    """Whether layers [L, ...] span so much more than others that one scale would leave these a single colour."""
    flat = products.reshape(len(products), -1)
    spans = flat.max(1) - flat.min(1)
    return bool(spans.max() > MOST_GROWTH * spans.min())


def pack(levels: NDArray[np.uint8]) -> str:
    """Bytes as text, compressed."""
    return base64.b64encode(zlib.compress(levels.tobytes(), 9)).decode("ascii")


def map_entry(
    name: str,
    title: str,
    caption: str,
    values: NDArray[Any],
    scale: Scale | list[Scale],
    colours: str,
    by: str,
    cells: str,
) -> dict[str, Any]:
    """A map for every layer and head. values [L, heads, rows, columns]; scale: of all layers, or one for each; by:
    "head", "group" or "layer"; cells: "cells" or "samples", what rows and columns stand for. Where there are several
    heads, their mean comes first.
    """
    scales = scale if isinstance(scale, list) else [scale] * len(values)
    if values.shape[1] > 1:
        values = np.concatenate((values.mean(1, keepdims=True), values), axis=1)
    return {
        "name": name,
        "title": title,
        "caption": caption,
        "scales": [vars(one) for one in scales],
        "colours": colours,
        "by": by,
        "cells": cells,
        "slices": int(values.shape[1]),
        "side": int(values.shape[2]),
        "data": [pack(one.encode(layer)) for one, layer in zip(scales, values, strict=True)],
    }


def maps_of(seen: Inspection) -> list[dict[str, Any]]:
    """The maps that follow the sliders."""
    maps = [
        map_entry(
            "attention", "Attention", "What each query (row) gives to each key (column). Square-root colours.",
            seen.past_only(seen.attention), root_scale(seen.attention), "viridis", "head", "cells",
        )
    ]  # fmt: skip
    if seen.attention_change is not None:
        maps.append(
            map_entry(
                "attention-change", "Attention minus that of the unmoved state",
                "The same weights with the state left as it starts (RoPE, for TAPE) taken away.",
                seen.past_only(seen.attention_change), signed_scale(seen.attention_change), "cividis", "head", "cells",
            )
        )  # fmt: skip
    if seen.products is not None:
        products = seen.products[:, None]
        own = grows(products)
        told = " Each layer has its own scale." if own else ""
        maps.append(
            map_entry(
                "products", "Products of states",
                f"Sum over heads and frequencies of Re(conj z_i z_j); 1 is a token with itself at the start.{told}",
                products, [linear_scale(layer) for layer in products] if own else linear_scale(products),
                "viridis", "layer", "cells",
            )
        )  # fmt: skip
        if seen.updates:
            change = products - products[:1]
            maps.append(
                map_entry(
                    "products-change", "Products minus those at the start",
                    f"What the layers before this one changed.{told}",
                    change, [signed_scale(layer) for layer in change] if own else signed_scale(change),
                    "cividis", "layer", "cells",
                )
            )  # fmt: skip
    if seen.distances is not None and seen.updates:
        change = seen.distances - seen.true_distances()
        maps.append(
            map_entry(
                "distance", "Effective minus true distance",
                "The distance at which plain rotary phasors would be most like these, minus the true one, in tokens.",
                change, signed_scale(change), "cividis", "group", "samples",
            )
        )  # fmt: skip
    if seen.mixing_mean is not None:
        mean = seen.mixing_mean[:, None]
        maps.append(
            map_entry(
                "mixing-mean", "Mean mixing matrix",
                "T averaged over the text: row, the head written to; column, the head read. Complex ones: modulus.",
                mean, signed_scale(mean), "cividis", "layer", "heads",
            )
        )  # fmt: skip
    return maps


def strip_entry(name: str, title: str, caption: str, values: NDArray[Any], by: str) -> dict[str, Any]:
    """Layers by cells. values [L, heads, C]."""
    if values.shape[1] > 1:
        values = np.concatenate((values.mean(1, keepdims=True), values), axis=1)
    scale = linear_scale(values)
    return {
        "name": name,
        "title": title,
        "caption": caption,
        "scale": vars(scale),
        "colours": "viridis",
        "by": by,
        "slices": int(values.shape[1]),
        "columns": int(values.shape[2]),
        "data": pack(scale.encode(values)),
    }


def strips_of(seen: Inspection) -> list[dict[str, Any]]:
    """Pictures of all layers (rows) and cells (columns)."""
    found: list[tuple[str, str, str, NDArray[Any] | None, str]] = []
    if seen.updates:
        found = [
            ("norms", "Norm of the phasors", "Root mean square over frequencies; 1 at a rotary start.",
             seen.norms, "group"),
            ("displacement", "Phase displacement", "Mean over frequencies, radians against the start.",
             seen.displacement, "group"),
            ("mixing-strength", "Strength of mixing", "Frobenius norm of the token's matrix T.",
             None if seen.mixing_strength is None else seen.mixing_strength[:, None], "layer"),
            ("mixing-own", "Own part of mixing",
             "How much of T is the token's own, and how much common to the text: |T - mean| / (|T - mean| + |mean|).",
             None if seen.mixing_own is None else seen.mixing_own[:, None], "layer"),
        ]  # fmt: skip
    return [
        strip_entry(name, title, caption, seen.pooled(values), by)
        for name, title, caption, values, by in found
        if values is not None
    ]


def strongest_mixers(seen: Inspection) -> list[list[tuple[int, float]]]:
    """For every layer the tokens that mix most, as (index, strength), the strongest first."""
    if seen.mixing_strength is None:
        return []
    return [
        [(seen.cells.first + int(index), float(f"{row[index]:.3g}")) for index in np.argsort(-row)[:NUM_MIXERS]]
        if not np.isnan(row).any()
        else []
        for row in seen.mixing_strength
    ]


def lines_of(seen: Inspection) -> list[dict[str, Any]]:
    """One number a layer: [{title, values}], null where a layer has none."""
    found: list[tuple[str, NDArray[Any]]] = []
    if seen.attention_change is not None:
        found.append(
            ("attention that differs from the unmoved", np.abs(seen.attention_change).sum(-1).mean((1, 2)) / 2)
        )
        if seen.norms is not None and seen.displacement is not None:
            found.append(("norm of the phasors", seen.norms.mean((1, 2))))
            found.append(("phase displacement, radians", seen.displacement.mean((1, 2))))
        if seen.distances is not None and seen.likeness is not None:
            moved = np.abs(seen.distances - seen.true_distances())
            found.append(("effective from true distance, tokens", np.nanmean(moved, (1, 2, 3))))
            found.append(("likeness to rotary phasors", np.nanmean(seen.likeness, (1, 2, 3))))
        if seen.mixing_strength is not None:
            found.append(("strength of mixing", seen.mixing_strength.mean(1)))
    return [
        {"title": title, "values": [None if np.isnan(value) else float(f"{value:.4g}") for value in values]}
        for title, values in found
    ]


def lookup_table(name: str) -> str:
    """256 colours as base64 of their bytes."""
    import matplotlib

    colours = (matplotlib.colormaps[name](np.linspace(0, 1, LEVELS + 1))[:, :3] * 255).round().astype(np.uint8)
    return base64.b64encode(colours.tobytes()).decode("ascii")


def page_data(seen: Inspection) -> dict[str, Any]:
    """Everything the page's script reads."""
    return {
        "labels": seen.labels,
        "cells": seen.cells.bounds,
        "samples": [(index, index) for index in seen.samples],
        "layers": seen.num_layers,
        "heads": int(seen.attention.shape[1]),
        "groups": int(seen.norms.shape[1]) if seen.norms is not None else 1,
        "maps": maps_of(seen),
        "strips": strips_of(seen),
        "lines": lines_of(seen),
        "mixers": strongest_mixers(seen),
        "colours": {name: lookup_table(name) for name in ("viridis", "cividis")},
    }


def write_page(
    path: Path,
    seen: Inspection,
    *,
    title: str,
    facts: Sequence[tuple[str, str]] = (),
    stability: Stability | None = None,
    certificate: Certificate | None = None,
) -> None:
    """Write the page. facts: pairs shown at its end, such as versions and the command."""
    import jinja2

    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("equitape", "inspect"),
        autoescape=lambda name: bool(name and name.endswith(".html.j2")),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # in a script element only "</" and "<!--" could end the data early
    data = json.dumps(page_data(seen), separators=(",", ":")).replace("<", "\\u003c")
    text = templates.get_template("page.html.j2").render(
        title=title,
        seen=seen,
        data=data,
        script=Path(__file__).with_name("page.js").read_text(encoding="utf-8"),
        facts=list(facts),
        stability=stability,
        certificate=certificate,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(path.name + ".part")
    aside.write_text(text, encoding="utf-8")
    os.replace(aside, path)
