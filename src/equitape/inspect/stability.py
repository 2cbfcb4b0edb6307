"""Change of attention and states when a text is moved: by tokens before it, or by ids that start elsewhere.

This is the paper's Table 8, which gives no formula for its differences. Ours are
- attention: the mean over heads and queries of half the sum over keys of |A' - A| (0 equal, 1 disjoint);
- state products: |P' - P| / |P| in the Frobenius norm, P_ij = sum over heads and frequencies of Re(conj z_i z_j).

Shapes: N tokens, H query heads.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..encodings.tape import TapeOptions
from ..model import EquitapeConfig, EquitapeModel
from .capture import (
    LayerRecord,
    decoder_of,
    frozen_state,
    is_at_start,
    update_weights,
    updates_state,
    visit_layers,
)  # fmt: skip
from .inspection import state_products

STARTS = (3, 1000, 1_000_000)
NUM_BEGIN_TOKENS = 3
MOST_TOKENS = 128
"""Maximum tokens: the attention of all layers is kept for the comparison."""
TWIN = "not equivariant"
UNSUPPORTED_BY_TWIN = (
    "scaling", "init", "layers", "source", "normalize", "complex_mixing", "decay", "clock", "move",
    "carried_frequencies", "rotate_values",
)  # fmt: skip
"""Options of TAPE that TensorTape does not have, or not in the same form."""


UNCHANGED, SLIGHT = 1e-4, 0.02
"""Largest change of attention over layers that counts as unchanged (rounding) and as slight."""
VERDICTS = ("unchanged", "slight change", "changed")


class Variant(NamedTuple):
    """A named model; `context` puts it into the state in which it is measured."""

    name: str
    model: Any
    context: AbstractContextManager[None]


@dataclass(frozen=True, kw_only=True)
class Change:
    """The change of one model under one disturbance, by layer."""

    model: str
    disturbance: str
    attention: list[float]
    products: list[float | None] | None
    """None for encodings without a state per token, and for layers with an encoding of their own."""

    @property
    def verdict(self) -> str:
        """One of VERDICTS, by the largest change of attention over layers."""
        largest = max(self.attention)
        return VERDICTS[0] if largest <= UNCHANGED else VERDICTS[1] if largest <= SLIGHT else VERDICTS[2]


@dataclass(frozen=True, kw_only=True)
class Stability:
    """The table, and notes on how it was made."""

    changes: list[Change]
    num_tokens: int
    notes: list[str]

    def verdicts(self) -> list[str]:
        """One sentence per model: what leaves its attention unchanged, and what changes it by how much at most."""
        sentences = []
        for model in dict.fromkeys(change.model for change in self.changes):
            changes = [change for change in self.changes if change.model == model]
            same = [change.disturbance for change in changes if change.verdict == VERDICTS[0]]
            moved = [
                f"{change.disturbance} ({max(change.attention):.2%})"
                for change in changes
                if change.verdict != VERDICTS[0]
            ]
            parts = [f"unchanged by {', '.join(same)}"] if same else []
            parts += [f"changed by {', '.join(moved)}"] if moved else []
            sentences.append(f"{model}: attention is {'; '.join(parts)}.")
        return sentences

    def shown_layers(self, what: str) -> list[int]:
        """Of the layers that have "attention" or "products" the first, second, fourth, eighth, ... and the last.

        They are counted from 1, as in the paper.
        """
        found = [values for change in self.changes if (values := getattr(change, what)) is not None]
        known = sorted({index + 1 for values in found for index, value in enumerate(values) if value is not None})
        places = {2**power for power in range(len(known).bit_length())} | {len(known)}
        return [layer for place, layer in enumerate(known, 1) if place in places]

    def rows(self, what: str) -> list[tuple[Change, list[float | None]]]:
        """Changes of "attention" or "products" at the shown layers; None beyond the last layer of a model."""
        found = [(change, getattr(change, what)) for change in self.changes]
        layers = self.shown_layers(what)
        return [
            (change, [values[layer - 1] if layer <= len(values) else None for layer in layers])
            for change, values in found
            if values is not None
        ]


def measure_stability(
    model: Any, input_ids: Tensor, begin_token: int, also: dict[str, Any] | None = None, starts: Sequence[int] = STARTS
) -> Stability:
    """Disturb a text [1, N] for a model, for the same weights with a frozen state, and for an ablation.

    The ablation is an untrained TensorTape made from TAPE's weights, whose mixing treats the two components of its
    tensors differently. also: further models by name, such as a trained ablation.
    """
    text = input_ids[:, :MOST_TOKENS]
    variants, notes = variants_of(model)
    variants += [Variant(name, other, nullcontext()) for name, other in (also or {}).items()]
    if input_ids.shape[1] > MOST_TOKENS:
        notes.insert(0, f"Measured on the first {MOST_TOKENS} of {input_ids.shape[1]} tokens.")
    changes: list[Change] = []
    for variant in variants:
        with variant.context:
            changes += disturb(variant, text, begin_token, starts, notes)
    return Stability(changes=changes, num_tokens=text.shape[1], notes=notes)


def variants_of(model: Any) -> tuple[list[Variant], list[str]]:
    """A model, the same with a frozen state, and the ablation if one can be made."""
    decoder = decoder_of(model)
    kind = decoder.encoding.kind
    own_name = kind if decoder.encoding.shift_invariant else f"{kind}, not shift invariant"
    variants, notes = [Variant(own_name, model, nullcontext())], []
    if not updates_state(model):
        return variants, [f"{kind!r} does not update a state, so there is no variant with the same weights to compare."]
    frozen = "rope" if starts_as_rope(decoder) else f"{kind}, not updated"
    variants.insert(0, Variant(frozen, model, frozen_state(model)))
    try:
        variants.append(Variant(TWIN, unequivariant_twin(decoder), nullcontext()))
        notes.append(
            f"{TWIN!r}: the same weights as a TensorTape whose mixing acts on only one component of each tensor, "
            f"equally strong. It was not trained that way."
        )
    except ValueError as error:
        notes.append(str(error))
    notes.append(f"{frozen!r}: the same weights with the update switched off.")
    # a single layer has no update, since nothing would read it
    disabled = not update_weights(decoder)
    if disabled or is_at_start(decoder):
        why = "disabled in all layers" if disabled else "zero everywhere, as at the start of training"
        notes.append(f"The update is {why}, so all variants are the same model.")
    return variants, notes


def starts_as_rope(decoder: EquitapeModel) -> bool:
    """Whether the state starts as RoPE's phasors."""
    return getattr(decoder.encoding.options, "init", None) == "rope"


def unequivariant_twin(decoder: EquitapeModel) -> EquitapeModel:
    """A decoder with a TAPE model's weights that mixes over heads and components, as the paper's ablation.

    T (x) I_2, which treats both components equally, becomes T (x) diag(sqrt 2, 0), of the same norm. All other weights
    are shared, not copied.
    """
    options = decoder.encoding.options
    if not isinstance(options, TapeOptions):
        raise ValueError(
            f"No ablation without equivariance can be made from the weights of {decoder.encoding.kind!r}; add a "
            "trained one with --also NAME=MODEL."
        )
    defaults = TapeOptions()
    changed = [name for name in UNSUPPORTED_BY_TWIN if getattr(options, name) != getattr(defaults, name)]
    if changed:
        raise ValueError(
            "No ablation without equivariance: TensorTape does not support this model's "
            f"{' and '.join(filter(None, (', '.join(changed[:-1]), changed[-1])))}."
        )
    encoding = {
        "kind": "tensor_tape",
        "mix_over": "heads+components",
        "theta": options.theta,
        "attention_update": options.attention_update,
        "mlp_update": options.mlp_update,
        "mixer_size": options.mixer_size or 4 * decoder.encoding.geometry.num_kv_heads,
    }
    config = EquitapeConfig.from_dict({**decoder.config.to_dict(), "encoding": encoding})
    with torch.device("meta"):
        twin = EquitapeModel(config)
    weights = dict(decoder.state_dict())
    # layers with an encoding of their own keep it
    local = tuple(f"layers.{layer}." for layer in decoder.local_layers if decoder.local_encoding is not None)
    first = torch.tensor([2**0.25, 0.0], device=decoder.device, dtype=decoder.dtype)
    for name, weight in weights.items():
        if name.startswith(local):
            continue
        if name.endswith(".mix_in"):
            # [I, G] -> [I, G * 2], components inside heads
            weights[name] = (weight[..., None] * first).flatten(1)
        if name.endswith(".mix_out"):
            weights[name] = (weight[:, None] * first[:, None]).flatten(0, 1)
    twin.load_state_dict(weights, assign=True)
    return twin.eval()


def disturb(
    variant: Variant, text: Tensor, begin_token: int, starts: Sequence[int], notes: list[str]
) -> Iterator[Change]:
    """One Change for tokens before the text, and one for every other start of the ids; a note if a model rejects
    one.
    """
    vocabulary, largest = decoder_of(variant.model).config.vocab_size, max(int(text.max()), begin_token)
    if largest >= vocabulary:
        notes.append(f"{variant.name}: Token {largest} is not in its vocabulary of {vocabulary}.")
        return
    try:
        original = run(variant.model, text)
    except ValueError as error:
        notes.append(f"{variant.name}: {error}")
        return
    front = torch.full((1, NUM_BEGIN_TOKENS), begin_token)
    with_front = torch.cat((front.to(text), text), dim=1)
    moves: dict[str, tuple[Tensor, Tensor | None]] = {f"{NUM_BEGIN_TOKENS} [BOS] in front": (with_front, None)}
    for start in starts:
        moves[f"ids from {start:,}"] = (text, torch.arange(start, start + text.shape[1])[None])
    for name, (tokens, ids) in moves.items():
        # a position table may be too short for it
        try:
            moved = run(variant.model, tokens, ids)
        except ValueError as error:
            notes.append(f"{variant.name}, {name}: {error}")
            continue
        yield compare(variant, name, original, moved)


def run(model: Any, text: Tensor, ids: Tensor | None = None) -> list[tuple[Tensor, Tensor | None]]:
    """Attention [H, N, N] and state products [N, N] of every layer; random positions are the same each time."""
    found: list[tuple[Tensor, Tensor | None]] = []

    def visit(index: int, record: LayerRecord) -> None:
        found.append((record.attention, None if record.state is None else state_products(record.state.double())))

    device = decoder_of(model).device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        visit_layers(model, text, visit, None if ids is None else ids.to(device))
    return found


def compare(variant: Variant, disturbance: str, original: list, moved: list) -> Change:
    """Differences over the tokens of the text, which are the last ones."""
    attention: list[float] = []
    products: list[float | None] = []
    for (weights, product), (other_weights, other_product) in zip(original, moved, strict=True):
        count = weights.shape[-1]
        difference = other_weights[:, -count:, -count:].double() - weights.double()
        attention.append(float(difference.abs().sum(-1).mean() / 2))
        change = None if product is None else (other_product[-count:, -count:] - product).norm() / product.norm()
        products.append(None if change is None else float(change))
    return Change(
        model=variant.name,
        disturbance=disturbance,
        attention=attention,
        products=products if any(value is not None for value in products) else None,
    )
