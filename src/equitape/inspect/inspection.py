"""What happens inside a model while it reads a text, as plain arrays; report/inspection.py shows them.

Shapes: L layers, H query heads, G key-value heads, N tokens shown, C cells (blocks of tokens), S sampled tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..encodings import PositionalEncoding, Positions
from .capture import LayerRecord, frozen_state, target_of, updates_state, visit_layers

Array = NDArray[np.float32]
DISTANCE_OPERATIONS = 4e10
"""Approximate number of operations for effective distances; more heads or layers mean fewer sampled tokens."""
MOST_SAMPLES, FEWEST_SAMPLES = 64, 12
OF_STATES = ("products", "norms", "displacement", "distances", "likeness")
"""Measures of states; NaN in layers with an encoding of their own."""


@dataclass(frozen=True, kw_only=True)
class Cells:
    """Blocks of neighbouring tokens, to fit a long text on a screen."""

    first: int
    """Index of the first token shown."""
    count: int
    """Tokens shown."""
    block: int
    """Tokens per cell; the last cell may have fewer."""

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """(first, last) token index of every cell."""
        end = self.first + self.count
        return [(start, min(start + self.block, end) - 1) for start in range(self.first, end, self.block)]

    def future(self) -> NDArray[np.bool_]:
        """[C, C]: True if all keys of the column come after all queries of the row."""
        first, last = np.array(self.bounds).T
        return first[None] > last[:, None]

    def membership(self, num_tokens: int) -> Tensor:
        """[C, num_tokens]: 1 if a token is in a cell."""
        token = torch.arange(num_tokens)
        low, high = torch.tensor(self.bounds).T
        return ((token >= low[:, None]) & (token <= high[:, None])).float()


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """The measurements. A field is None if it does not apply to the encoding."""

    encoding: dict[str, Any]
    num_tokens: int
    """Tokens the model read."""
    labels: list[str]
    """The text of every token."""
    cells: Cells
    attention: Array
    """[L, H, C, C]: attention of the row's queries to all keys of the column, averaged over the queries."""
    attention_change: Array | None
    """`attention` minus the attention with the state frozen at its initial value (for TAPE: RoPE's attention)."""
    products: Array | None
    """[L, C, C]: state products in units of the initial mean square; layer 1 shows the initial state."""
    norms: Array | None
    """[L, G, N]."""
    displacement: Array | None
    """[L, G, N], radians."""
    samples: list[int]
    """Indices of the tokens between which distances were computed."""
    distances: Array | None
    """[L, G, S, S]: effective distance from query (row) to key; NaN above the diagonal."""
    likeness: Array | None
    """[L, G, S, S]: how well that distance fits the phasors, from 0 to 1."""
    mixing_strength: Array | None
    """[L, N]: Frobenius norm of every token's mixing matrix; NaN in layers without mixing."""
    mixing_own: Array | None
    """[L, N]: token-specific part: |T - mean| / (|T - mean| + |mean|), from 0 to 1."""
    mixing_mean: Array | None
    """[L, G, G]: the mean matrix (its modulus if complex)."""
    causal: bool = True
    """Whether tokens attend only to earlier ones."""

    @property
    def num_layers(self) -> int:
        return int(self.attention.shape[0])

    @property
    def updates(self) -> bool:
        return self.attention_change is not None

    def pooled(self, values: Array) -> Array:
        """Pool token values [..., N] to cell means [..., C]."""
        parts = np.array_split(values, [first - self.cells.first for first, _ in self.cells.bounds[1:]], axis=-1)
        return np.stack([part.mean(-1) for part in parts], axis=-1)

    def past_only(self, values: Array) -> Array:
        """Maps [..., C, C] with NaN where causality hides the keys."""
        if not self.causal:
            return values
        return np.where(self.cells.future(), np.float32(np.nan), values)

    def true_distances(self) -> Array:
        """[S, S], NaN above the diagonal."""
        place = np.array(self.samples, dtype=np.float32)
        return np.where(place[:, None] >= place, place[:, None] - place, np.nan).astype(np.float32)

    def by_layer(self) -> dict[str, list[float | None]]:
        """One number per layer for every measure of the update; None in layers without one."""
        found: dict[str, NDArray[Any]] = {}
        if self.attention_change is None:
            return {}
        found["attention moved by the update"] = np.abs(self.attention_change).sum(-1).mean((1, 2)) / 2
        if self.norms is not None and self.displacement is not None:
            found["norm of the phasors"] = self.norms.mean((1, 2))
            found["phase displacement, radians"] = self.displacement.mean((1, 2))
        if self.distances is not None and self.likeness is not None:
            past = ~np.isnan(self.true_distances())
            moved = np.abs(self.distances - self.true_distances())
            found["effective minus true distance, tokens"] = moved[..., past].mean((1, 2))
            found["likeness to rotary phasors"] = self.likeness[..., past].mean((1, 2))
        if self.mixing_strength is not None:
            found["strength of mixing"] = self.mixing_strength.mean(1)
        return {
            title: [None if np.isnan(value) else float(f"{value:.4g}") for value in values]
            for title, values in found.items()
        }

    def strongest_mixers(self, count: int) -> list[list[tuple[int, float]]]:
        """The tokens that mix most in every layer, as (index, strength), strongest first."""
        if self.mixing_strength is None:
            return []
        return [
            [(self.cells.first + int(index), float(f"{row[index]:.3g}")) for index in np.argsort(-row)[:count]]
            if not np.isnan(row).any()
            else []
            for row in self.mixing_strength
        ]

    def notes(self) -> list[str]:
        """Sentences on how the text was truncated and down-sampled."""
        shown, cells = self.cells, len(self.cells.bounds)
        notes = []
        if shown.count < self.num_tokens:
            last = shown.first + shown.count - 1
            notes.append(f"Shows tokens {shown.first} to {last} of {self.num_tokens}.")
        if shown.block > 1:
            notes.append(
                f"Down-sampled: {shown.count} tokens as {cells} x {cells} cells of {shown.block} tokens. A cell of "
                f"attention is the sum over its keys, averaged over its queries. A product is the mean over the cell, "
                f"so finer patterns may cancel. Show fewer tokens (--show) for full resolution."
            )
        if self.updates and cells < self.num_tokens:
            notes.append(
                "Attention moved by the update is counted between the cells shown: what moves inside a cell, or to and "
                "from tokens that are not shown, is missing."
            )
        if self.distances is not None and len(self.samples) < shown.count:
            notes.append(f"Effective distances are between {len(self.samples)} evenly spaced tokens, not averaged.")
        return notes


class Collector:
    """Collects the records of one forward pass, down-sampled layer by layer."""

    def __init__(
        self, cells: Cells, num_tokens: int, samples: list[int], frequencies: Tensor | None, is_field: bool = False
    ):
        self.cells = cells
        self.is_field = is_field
        self.samples = torch.tensor(samples)
        self.frequencies = frequencies
        self.shown = slice(cells.first, cells.first + cells.count)
        self.sums = cells.membership(num_tokens)
        self.means = self.sums / self.sums.sum(1, keepdim=True)
        self.reach = num_tokens
        self.start: Tensor | None = None
        self.found: dict[str, list[Array | None]] = {}

    def visit(self, index: int, record: LayerRecord) -> None:
        """Add the record of one layer."""
        if not bool(torch.isfinite(record.attention).all()):
            raise ValueError(
                f"The attention of layer {index + 1} has NaN or infinity: either the weights have, or sums overflow "
                f"{str(record.attention.dtype).removeprefix('torch.')}. Run `equitape check` for details."
            )
        self.keep("attention", self.pool_attention(record.attention))
        if record.state is None:
            self.miss(OF_STATES)
        else:
            state = record.state.cpu()
            products = state_products(state).float()
            if self.start is None:
                self.start = state
                self.unit = products.diagonal().mean()
            self.keep("products", self.means @ (products / self.unit) @ self.means.mT)
            if self.is_field:
                self.keep("norms", phasor_norms(state)[:, self.shown])
                self.keep("displacement", phase_displacement(state, self.start)[:, self.shown])
            if self.frequencies is not None:
                self.visit_distances(state, self.frequencies)
        self.visit_mixing(record.mixing)

    def visit_distances(self, field: Tensor, frequencies: Tensor) -> None:
        z = as_complex(field[:, self.samples].float())
        heads, count = z.shape[:2]
        query, key = torch.tril_indices(count, count)
        distances, likeness = (torch.full((heads, count, count), math.nan) for _ in range(2))
        for head in range(heads):
            found = effective_distances(z[head, query], z[head, key], frequencies, self.reach)
            distances[head, query, key], likeness[head, query, key] = (part.float() for part in found)
        self.keep("distances", distances)
        self.keep("likeness", likeness)

    def visit_mixing(self, mixing: Tensor | None) -> None:
        if mixing is None:
            self.miss(("mixing_strength", "mixing_own", "mixing_mean"))
            return
        mixing = mixing.cpu()
        mean = mixing.mean(0)
        strength = mixing.abs().square().sum((1, 2)).sqrt()
        own = (mixing - mean).abs().square().sum((1, 2)).sqrt()
        self.keep("mixing_strength", strength[self.shown])
        common = mean.abs().square().sum().sqrt()
        self.keep("mixing_own", (own / (own + common).clamp(min=1e-30))[self.shown])
        self.keep("mixing_mean", mean.abs() if mean.is_complex() else mean)

    def pool_attention(self, attention: Tensor) -> Tensor:
        """[H, N, N] -> [H, C, C]: mean over the queries of a cell, sum over its keys."""
        return self.means @ attention.float().cpu() @ self.sums.mT

    def keep(self, name: str, value: Tensor) -> None:
        self.found.setdefault(name, []).append(value.float().numpy().copy())

    def miss(self, names: Sequence[str]) -> None:
        """Note that a layer has none of these."""
        for name in names:
            self.found.setdefault(name, []).append(None)

    def stacked(self, name: str) -> Array | None:
        """All layers of one kind; NaN for layers without it, None if no layer has it."""
        parts = self.found.get(name, [])
        known = next((part for part in parts if part is not None), None)
        if known is None:
            return None
        return np.stack([np.full_like(known, np.nan) if part is None else part for part in parts])


def inspect_model(
    model: Any,
    inputs: Tensor,
    labels: Sequence[str] | None = None,
    *,
    position_ids: Tensor | None = None,
    show: tuple[int, int] | None = None,
    max_cells: int = 128,
) -> Inspection:
    """Run a text [1, N] through an Equitape model with updated and with frozen state, and measure both.

    A module built from equitape.nn takes any input of one row, with the ids of its tokens, [N] or [N, A]. labels: token
    texts. Default: their ids. show: (first, end) of the tokens to keep; the model reads all of them. max_cells: more
    tokens than this are pooled into cells.
    """
    target = target_of(model)
    encoding = target.encoding
    if position_ids is None:
        if inputs.dim() != 2 or inputs.shape[0] != 1 or inputs.shape[1] < 2:
            raise ValueError(
                f"input_ids has shape {list(inputs.shape)}; it must be [1, N], one text of at least 2 tokens."
            )
        num_tokens, names = inputs.shape[1], [str(token) for token in inputs[0].tolist()]
    else:
        num_tokens, names = len(position_ids), [name_of(own) for own in position_ids.tolist()]
    named = list(labels) if labels is not None else names
    if len(named) != num_tokens:
        raise ValueError(f"There are {len(named)} labels for {num_tokens} tokens; give one per token.")
    cells = choose_cells(num_tokens, show, max_cells)
    geometry = encoding.geometry
    on_one_axis = encoding.has_field and geometry.num_axes == 1
    frequencies = rotary_frequencies(encoding, num_tokens) if on_one_axis else None
    applications = geometry.num_layers * geometry.num_loops
    samples = choose_samples(cells, 3.0 * num_tokens * applications * geometry.num_kv_heads * geometry.head_dim)

    updated = Collector(cells, num_tokens, samples, frequencies, encoding.has_field)
    visit_layers(model, inputs, updated.visit, position_ids)
    attention = updated.stacked("attention")
    assert attention is not None
    change = None
    if updates_state(model):
        frozen = Collector(cells, num_tokens, samples, None)

        def visit_attention(index: int, record: LayerRecord) -> None:
            frozen.keep("attention", frozen.pool_attention(record.attention))

        with frozen_state(model):
            visit_layers(model, inputs, visit_attention, position_ids)
        plain = frozen.stacked("attention")
        assert plain is not None
        change = attention - plain
    return Inspection(
        encoding={"kind": encoding.kind, **encoding.options.to_dict()},
        causal=target.causal,
        num_tokens=num_tokens,
        labels=named,
        cells=cells,
        attention=attention,
        attention_change=change,
        samples=[] if frequencies is None else samples,
        **{name: updated.stacked(name) for name in (*OF_STATES, "mixing_strength", "mixing_own", "mixing_mean")},
    )


def name_of(ids: int | list[int]) -> str:
    """The place of a token: "5", or "2,3" on several axes."""
    return ",".join(f"{number:g}" for number in (ids if isinstance(ids, list) else [ids]))


def choose_cells(num_tokens: int, show: tuple[int, int] | None, max_cells: int) -> Cells:
    """The smallest blocks that give at most max_cells cells."""
    if max_cells < 2:
        raise ValueError(f"max_cells is {max_cells}; it must be at least 2.")
    first, end = show if show is not None else (0, num_tokens)
    if not 0 <= first < end - 1 < num_tokens:
        raise ValueError(
            f"Cannot show tokens {first} to {end}: the text has {num_tokens} tokens, and at least two are needed."
        )
    return Cells(first=first, count=end - first, block=math.ceil((end - first) / max_cells))


def choose_samples(cells: Cells, cost_of_pair: float) -> list[int]:
    """Evenly spaced tokens, as many as DISTANCE_OPERATIONS allows."""
    # S^2 / 2 pairs, with one multiplication and addition each
    affordable = int(math.sqrt(DISTANCE_OPERATIONS / cost_of_pair))
    count = min(cells.count, MOST_SAMPLES, max(FEWEST_SAMPLES, affordable))
    return [cells.first + round(index * (cells.count - 1) / (count - 1)) for index in range(count)]


def as_complex(field: Tensor) -> Tensor:
    """[G, N, 2 M] real -> [G, N, M] complex."""
    return torch.complex(*field.to(torch.promote_types(field.dtype, torch.float32)).chunk(2, dim=-1))


def state_products(state: Tensor) -> Tensor:
    """Products of all pairs of tokens, over heads and frequencies: the sum of Re(conj z_i z_j), [G, N, E] -> [N, N]."""
    flat = state.transpose(0, 1).flatten(1).to(torch.promote_types(state.dtype, torch.float32))
    return flat @ flat.mT


def phasor_norms(field: Tensor) -> Tensor:
    """Root mean square of |z| over frequencies: [G, N]."""
    return as_complex(field).abs().square().mean(-1).sqrt()


def phase_displacement(field: Tensor, start: Tensor) -> Tensor:
    """Phase displacement from the initial state: the mean over frequencies of |arg(conj z_start z)|, [G, N]."""
    return (as_complex(start).conj() * as_complex(field)).angle().abs().mean(-1)


def rotary_frequencies(encoding: PositionalEncoding, num_tokens: int) -> Tensor:
    """theta_m [M] in float64, read from the phasors that an encoding starts with at ids 0 and 1."""
    ids, span = torch.tensor([[0, 1]]), torch.tensor([[num_tokens]])
    start = encoding.initial_state(Positions(ids=ids, origin=torch.zeros_like(span), span=span), torch.float64)
    assert start is not None
    first = as_complex(encoding.field(start)[0])[0]
    return (first[0].conj() * first[1]).angle()


def effective_distances(queries: Tensor, keys: Tensor, frequencies: Tensor, reach: int) -> tuple[Tensor, Tensor]:
    """The distance at which plain rotary phasors match these best: ([P], [P]) for pairs of tokens.

    The distance d that maximises Re sum_m conj(k_m) q_m exp(-i theta_m d), searched from -reach to 2 reach and refined
    between integers by a parabola; and the quality of the match, from 0 to 1 (1 for unchanged rotary phasors). Only
    products conj(k) q enter, so rotating all phasors of a frequency changes nothing. queries, keys: [P, M] complex.
    """
    relative = queries * keys.conj()
    grid = torch.arange(-reach, 2 * reach + 1, dtype=torch.float64)
    angles = grid[:, None] * frequencies.double()
    # Re(a exp(-i x)) = Re a cos x + Im a sin x, for all pairs and distances in one product
    waves = torch.cat((angles.cos(), angles.sin()), dim=1).to(relative.real.dtype)
    likeness = torch.cat((relative.real, relative.imag), dim=1) @ waves.mT
    best = likeness.argmax(1)
    inner = best.clamp(1, len(grid) - 2)
    left, middle, right = (likeness.gather(1, (inner + step)[:, None])[:, 0] for step in (-1, 0, 1))
    curvature = left - 2 * middle + right
    offset = torch.where(curvature < 0, (left - right) / (2 * curvature), 0.0).clamp(-0.5, 0.5)
    offset = torch.where(inner == best, offset, 0.0)
    size = relative.abs().sum(1).clamp(min=torch.finfo(likeness.dtype).tiny)
    return grid[best].to(likeness.dtype) + offset, (likeness.gather(1, best[:, None])[:, 0] / size).clamp(min=0.0)
