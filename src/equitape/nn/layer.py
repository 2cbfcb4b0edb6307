"""One layer's part of an encoding with the pieces of attention around it, for people with their own attention call.

Shapes: B batch, N tokens, K keys, H query heads, G key-value heads, D head dimension, E extra value columns, C hidden
size, A axes.
"""

from collections.abc import Iterable
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor, nn

from ..encodings import Geometry, LayerEncoding, PositionalEncoding, Positions, build_encoding, parse_encoding
from ..encodings.positions import sequence_extent
from ..registry import describe_choices
from . import core

Encoding = str | dict[str, Any] | PositionalEncoding
"""A kind such as "tape", a kind with options such as {"kind": "tape", "mixer_size": 16}, or an encoding that several
layers share, from `make_encoding`.
"""


class Sizes(TypedDict, total=False):
    """Sizes besides hidden_size and num_heads, described in `make_encoding`."""

    num_kv_heads: int
    head_dim: int
    num_axes: int
    mixed_axes: bool
    max_positions: int


def make_encoding(
    encoding: str | dict[str, Any], hidden_size: int, num_heads: int, num_layers: int, **sizes: Unpack[Sizes]
) -> PositionalEncoding:
    """An encoding for all layers of a model: `encoding.layer(i)` has the weights of layer i.

    Args:
        encoding: A kind such as "tape", or a dictionary with its options.
        hidden_size: C.
        num_heads: H.
        num_layers: Layers of the model.
        **sizes: num_kv_heads (default: num_heads), head_dim (default: hidden_size / num_heads), num_axes (numbers in a
            position id, default: 1), mixed_axes (frequencies turn with directions across all axes, default: False),
            max_positions (for encodings that depend on it, default: 2048).
    """
    geometry = make_geometry(hidden_size, num_heads, num_layers, sizes)
    return build_encoding(parse_encoding(encoding, geometry), geometry)


def refuse_unknown(given: Iterable[str], allowed: Iterable[str] = Sizes.__annotations__) -> None:
    """Raise TypeError for a keyword that is not allowed."""
    unknown = sorted(set(given) - set(allowed))
    if unknown:
        raise TypeError(f"Unknown keyword {unknown[0]!r}.{describe_choices(unknown[0], allowed)}")


def make_geometry(hidden_size: int, num_heads: int, num_layers: int, sizes: Sizes) -> Geometry:
    """Check sizes and fill in defaults."""
    refuse_unknown(sizes)
    counts = {"hidden_size": hidden_size, "num_heads": num_heads, "num_layers": num_layers, **sizes}
    for name, number in counts.items():
        if name != "mixed_axes" and (not isinstance(number, int) or number < 1):
            raise ValueError(f"{name} is {number!r}; it must be a whole number of 1 or more.")
    if "head_dim" not in sizes and hidden_size % num_heads:
        raise ValueError(
            f"hidden_size {hidden_size} is not a multiple of num_heads {num_heads}; change one of them or set head_dim."
        )
    num_kv_heads = sizes.get("num_kv_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ValueError(
            f"num_heads {num_heads} is not a multiple of num_kv_heads {num_kv_heads}; all key-value heads must serve "
            f"equally many query heads."
        )
    return Geometry(
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=sizes.get("head_dim", hidden_size // num_heads),
        num_layers=num_layers,
        num_axes=sizes.get("num_axes", 1),
        mixed_axes=sizes.get("mixed_axes", False),
        max_positions=sizes.get("max_positions", 2048),
    )


def encoding_for_layer(
    encoding: Encoding, hidden_size: int, num_heads: int, layer: int, num_layers: int | None, sizes: Sizes
) -> PositionalEncoding:
    """The encoding of a layer: a shared one if its sizes agree, or a new one from its kind.

    A new one has no weights outside its layers: each layer would have its own copy, and most would never be trained.
    """
    if isinstance(encoding, PositionalEncoding):
        refuse_unknown(sizes)
        own = encoding.geometry
        given = {
            "hidden_size": hidden_size,
            "num_heads": num_heads,
            "num_layers": num_layers or own.num_layers,
            **sizes,
        }
        for name, number in given.items():
            if getattr(own, name) != number:
                raise ValueError(
                    f"The layer has {name} {number}, but its encoding was made with {getattr(own, name)}; make them "
                    f"equal."
                )
        count = own.num_layers
    else:
        # nothing is known of the next layer: assume that there is one
        count = layer + 2 if num_layers is None else num_layers
        encoding = make_encoding(encoding, hidden_size, num_heads, count, **sizes)
        adds_to_embeddings = type(encoding).embed is not PositionalEncoding.embed
        if adds_to_embeddings or next(encoding.parameters(), None) is not None:
            what = "adds to the embeddings" if adds_to_embeddings else "has weights that all layers share"
            raise ValueError(
                f"Encoding {encoding.kind!r} {what}: make it once with equitape.nn.make_encoding and pass it to all "
                f"layers."
            )
    if not 0 <= layer < count:
        raise ValueError(f"layer is {layer}; the model has layers 0 to {count - 1}.")
    if getattr(encoding, "has_clock", False):
        raise ValueError("A clock reads the embeddings, which an attention layer does not have; set clock to false.")
    return encoding


class Pieces:
    """The steps around an attention call; each is a method with a check of its input."""

    encoding: LayerEncoding
    layer: int
    _whole: tuple[PositionalEncoding]

    @property
    def model_encoding(self) -> PositionalEncoding:
        """The encoding that this layer is part of. Not a submodule: layers may share it."""
        return self._whole[0]

    @property
    def geometry(self) -> Geometry:
        return self.model_encoding.geometry

    @property
    def updates_state(self) -> bool:
        """Whether the next layer gets another state than this one."""
        return self.encoding.updates_state

    @property
    def state_changes(self) -> bool:
        """Whether layers of this encoding have different states, so that each needs that of the layer before it."""
        return type(self.encoding).update is not LayerEncoding.update

    @property
    def _value_dim(self) -> int:
        """Width of the value before it is widened."""
        return self.geometry.head_dim - self.encoding.value_room

    def initial_state(self, positions: Positions | Tensor, dtype: torch.dtype | None = None) -> Tensor | None:
        """The state of the first layer: for TAPE and RoPE phasors [B or 1, G or 1, N, D]; None if there is none.

        positions: ids [N] or [B, N] ([N, A] or [B, N, A] with several axes), or what `locate` returns. dtype: that of
        queries, keys and values. Default: torch's default.
        """
        check_real("The state", dtype or torch.get_default_dtype())
        if isinstance(positions, Positions):
            located = positions
        else:
            located = Positions(self._batch_of_ids(positions))
            if self.model_encoding.needs_extent:
                origin, span = sequence_extent(located.ids, None, None)
                located = located._replace(origin=origin, span=span)
        return self.model_encoding("initial_state", located, dtype or torch.get_default_dtype())

    def _batch_of_ids(self, ids: Tensor) -> Tensor:
        """Ids as [B, N], or [B, N, A] with several axes; ValueError for other shapes."""
        axes = self.geometry.num_axes
        inner = [] if axes == 1 else [axes]
        size = 1 + len(inner)
        if (
            isinstance(ids, Tensor)
            and ids.dim() in (size, size + 1)
            and list(ids.shape[ids.dim() - len(inner) :]) == inner
        ):
            return ids if ids.dim() > size else ids[None]
        shape = "[N] or [B, N]" if axes == 1 else f"[N, {axes}] or [B, N, {axes}]"
        raise ValueError(f"positions {core.describe(ids)}; it must be a tensor {shape}.")

    def apply_rotary(self, query: Tensor, key: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Rotate queries [B, H, N, D] and keys [B, G, N, D] by the state."""
        self._check_heads("query", query, self.geometry.num_heads)
        self._check_heads("key", key, self.geometry.num_kv_heads, query.shape[0], query.shape[2])
        self.check_state(state, query.shape[0], query.shape[2], query.dtype)
        return self.encoding("rotate", query, key, state)

    def widen(self, value: Tensor, state: Tensor | None) -> Tensor:
        """Append what attention must average to the value: [B, G, N, D] -> [B, G, N, D + E]."""
        self._check_heads("value", value, self.geometry.num_kv_heads, dim=self._value_dim)
        self.check_state(state, value.shape[0], value.shape[2], value.dtype)
        return core.widen(value, self.encoding("extra_values", state))

    def split(self, output: Tensor) -> tuple[Tensor, Tensor | None]:
        """The attention of a widened value, [..., D + E]: output [..., D] and what was carried [..., E], or None."""
        dim, columns = self._value_dim, self.model_encoding.carried_columns[self.layer]
        if output.shape[-1] != dim + columns:
            raise ValueError(
                f"The output of attention has width {output.shape[-1]}; it must be [..., {dim + columns}], which is "
                f"what attention makes of a widened value."
            )
        return core.split(output, dim) if columns else (output, None)

    def update(self, state: Tensor | None, carried: Tensor | None, features: Tensor) -> Tensor | None:
        """The state of the next layer.

        carried: [B, H, N, E], the attention average of the state; features: [B, N, C], what the gates read.
        """
        hidden, columns = self.geometry.hidden_size, self.model_encoding.carried_columns[self.layer]
        if features.dim() != 3 or features.shape[-1] != hidden:
            raise ValueError(f"features {core.describe(features)}; it must be [B, N, {hidden}].")
        batch, num_tokens = features.shape[:2]
        self.check_state(state, batch, num_tokens, features.dtype)
        if columns and carried is None:
            raise ValueError(
                "The update needs what attention carried: widen the value before attention, then split it."
            )
        expected = [batch, self.geometry.num_heads, num_tokens, columns]
        if columns and carried is not None and list(carried.shape) != expected:
            raise ValueError(f"carried {core.describe(carried)}; with these features it must be {expected}.")
        return self.encoding("update", state, carried, features, features)

    def _check_heads(
        self,
        name: str,
        heads: Tensor,
        count: int,
        batch: int | None = None,
        num_tokens: int | None = None,
        dim: int | None = None,
    ) -> None:
        """Raise ValueError for heads that are not [B, count, N, D]."""
        expected = [batch, count, num_tokens, dim or self.geometry.head_dim]
        if heads.dim() == 4 and all(
            number is None or number == own for number, own in zip(expected, heads.shape, strict=True)
        ):
            return
        words = ", ".join(
            letter if number is None else str(number) for letter, number in zip("BHND", expected, strict=True)
        )
        raise ValueError(f"{name} {core.describe(heads)}; it must be [{words}].")

    def check_state(
        self, state: Tensor | None, batch: int, num_tokens: int, dtype: torch.dtype, name: str = "state"
    ) -> None:
        """Raise ValueError for a state that cannot be of this layer."""
        check_real("The tensor of tokens", dtype)
        if not self.model_encoding.has_field:
            return
        if state is None:
            raise ValueError(f"Layer {self.layer} got no {name}; pass the one that the layer before it returned.")
        # RoPE's state is the same for all heads
        width = self.model_encoding.state_width
        groups = self.geometry.num_kv_heads if self.state_changes and width is None else 1
        expected = [batch, groups, num_tokens, width or self.geometry.head_dim]
        if not isinstance(state, Tensor) or list(state.shape) not in (expected, [1, *expected[1:]]):
            raise ValueError(
                f"The {name} {core.describe(state)}, but this layer expects {expected}; pass the state that the layer "
                f"before it returned for the same tokens, not one of another model or encoding."
            )
        if state.dtype != dtype and self.updates_state and not torch.is_autocast_enabled(state.device.type):
            raise ValueError(
                f"The {name} is {state.dtype} and the tokens are {dtype}; make both equal, for example with "
                f"initial_state(positions, {dtype})."
            )


def check_real(name: str, dtype: torch.dtype) -> None:
    """Raise ValueError for integers, truth values and complex numbers."""
    if not dtype.is_floating_point:
        raise ValueError(f"{name} is {dtype}; it must be floating point: embed ids first, or convert it with .float().")


class PositionalLayer(Pieces, nn.Module):
    """An encoding's part in one layer, without projections: its weights, and the steps around your attention call.

    Call it through the methods `initial_state`, `apply_rotary`, `widen`, `split` and `update`.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        encoding: Encoding = "tape",
        *,
        layer: int = 0,
        num_layers: int | None = None,
        **sizes: Unpack[Sizes],
    ):
        super().__init__()
        whole = encoding_for_layer(encoding, hidden_size, num_heads, layer, num_layers, sizes)
        if any(whole.key_columns) or whole.adds_bias or whole.needs_causal:
            raise ValueError(
                f"Encoding {whole.kind!r} also changes scores, which these pieces do not; use equitape.nn.Attention."
            )
        if whole.carried_columns != whole.value_columns:
            raise ValueError(
                f"Encoding {whole.kind!r} with carried_frequencies needs a narrower value projection, which these "
                f"pieces do not have; use equitape.nn.Attention."
            )
        self._whole = (whole,)
        self.layer = layer
        self.encoding = whole.layer(layer)
        if self.encoding.value_heads:
            raise ValueError(
                f"Encoding {whole.kind!r} with rotate_values rotates the output of attention back, which these pieces "
                f"do not; use equitape.nn.Attention."
            )

    @property
    def scale(self) -> float:
        """The softmax scale of your attention call."""
        return self.geometry.head_dim**-0.5 * self.model_encoding.score_scale
