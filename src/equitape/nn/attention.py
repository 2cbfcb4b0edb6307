"""Attention as a plain module: `y, state = attention(x, state)`.

Shapes: B batch, N tokens, K keys, H query heads, G key-value heads, D head dimension, C hidden size, A axes.
"""

from collections.abc import Callable
from inspect import Parameter, signature
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import Cache

from ..encodings import Positions
from ..encodings.frequencies import Scaling
from ..encodings.positions import key_ids
from .core import AttentionCore, AttentionMask, Context, describe, is_quantised
from .ids import locate
from .layer import Encoding, Pieces, Sizes, check_real, encoding_for_layer, refuse_unknown
from .masks import behind, mask_function, materialise

IMPLEMENTATIONS = ("sdpa", "eager", "flex_attention")


class TupleCache:
    """A plain tuple (key, value), or () before the first call, as a cache of one layer."""

    def __init__(self, held: tuple[Tensor, ...]):
        if len(held) not in (0, 2):
            raise ValueError(f"cache is a tuple of {len(held)}; it must be (), or the (key, value) of the last call.")
        self.held = held

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of cached tokens."""
        return self.held[0].shape[2] if self.held else 0

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Append keys [B, G, N, D] and values [B, G, N, E]."""
        if self.held:
            key_states = torch.cat((self.held[0], key_states), dim=2)
            value_states = torch.cat((self.held[1], value_states), dim=2)
        self.held = (key_states, value_states)
        return key_states, value_states


class LayerOptions(Sizes, total=False):
    """Keywords of every attention layer, described in `Attention`."""

    layer: int
    num_layers: int
    causal: bool
    window: int
    bias: bool
    output_bias: bool
    qk_norm: bool
    dropout: float
    implementation: str


def keywords(cls: type["Attention"]) -> set[str]:
    """All keywords of a layer."""
    named = {each.name for each in signature(cls).parameters.values() if each.kind is not Parameter.VAR_KEYWORD}
    return named | set(LayerOptions.__annotations__)


class Attention(Pieces, AttentionCore):
    """Grouped-query attention with a positional encoding.

    The state is None for the first layer, which then makes it from the positions; every further layer gets the state
    that the layer before it returned.

    Args:
        hidden_size: C.
        num_heads: H.
        encoding: A kind such as "tape", a dictionary with its options, or what `make_encoding` returns.
        layer: Index of the layer in the model.
        num_layers: Layers of the model: the last one does not update the state. Default: there is a next layer.
        causal: Whether tokens attend only to earlier ones.
        window: Attend to the last `window` tokens only; without causality, to those fewer than `window` away; with
            several axes, along each of them.
        bias: Biases of the q, k and v projections.
        output_bias: Bias of the o projection. Default: `bias`.
        qk_norm: RMS norm on every query and key head.
        dropout: Fraction of attention weights dropped in training.
        implementation: "sdpa", "eager" or "flex_attention".
        **sizes: num_kv_heads, head_dim, num_axes, mixed_axes and max_positions, as in `make_encoding`.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        encoding: Encoding = "rope",
        *,
        layer: int = 0,
        num_layers: int | None = None,
        causal: bool = True,
        window: int | None = None,
        bias: bool = False,
        output_bias: bool | None = None,
        qk_norm: bool = False,
        dropout: float = 0.0,
        implementation: str = "sdpa",
        **sizes: Unpack[Sizes],
    ):
        refuse_unknown(sizes, keywords(type(self)))
        whole = encoding_for_layer(encoding, hidden_size, num_heads, layer, num_layers, sizes)
        if implementation not in IMPLEMENTATIONS or implementation not in whole.backends:
            able = ", ".join(repr(name) for name in IMPLEMENTATIONS if name in whole.backends)
            raise ValueError(f"Encoding {whole.kind!r} has no implementation {implementation!r}; use one of {able}.")
        if whole.needs_causal and not causal:
            raise ValueError(
                f"Encoding {whole.kind!r} with these options needs causal attention; use causal=True, or 'rope' or "
                f"'tape' without decay."
            )
        if window is not None and (not isinstance(window, int) or window < 1):
            raise ValueError(f"window is {window}; it must be a whole number of 1 or more.")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout is {dropout}; it must be from 0 to below 1.")
        geometry = whole.geometry
        super().__init__(
            whole.layer(layer),
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=geometry.num_kv_heads,
            head_dim=geometry.head_dim,
            bias=bias,
            output_bias=bias if output_bias is None else output_bias,
            qk_norm=qk_norm,
            dropout=dropout,
        )
        self._whole = (whole,)
        self.layer = layer
        self.is_causal = self.causal = causal
        self.window = window
        self.implementation = implementation

    def forward(
        self,
        x: Tensor,
        state: Tensor | None = None,
        *,
        positions: Tensor | Positions | None = None,
        segment_ids: Tensor | None = None,
        padding_mask: Tensor | None = None,
        mask: Tensor | BlockMask | None = None,
        context: Tensor | None = None,
        context_state: Tensor | None = None,
        context_positions: Tensor | Positions | None = None,
        cache: Cache | tuple[Tensor, ...] | None = None,
        features: Callable[[Tensor], Tensor] | None = None,
    ) -> Any:
        """Returns the output [B, N, C] and the state for the next layer; with a tuple as cache, also the new tuple.

        positions: ids [N] or [B, N] ([N, A] or [B, N, A] with several axes), or what `locate` returns. Default: counted
            from 0, after the cached tokens.
        segment_ids: [N] or [B, N], equal for the tokens of a packed sequence, which see only each other.
        padding_mask: [B, N], 1 for tokens and 0 for padding.
        mask: used instead of all masks from above, causality and window: boolean (True attends) or additive
            [N, K], [B, 1, N, K] or [B, H, N, K], or a FlexAttention BlockMask.
        context: [B, K, C], another sequence to attend to, with its state and positions (default for these: made as for
            x). Nothing but `mask` and the padding of context_positions hides its tokens.
        cache: transformers' Cache, or () and then the tuple that the last call returned.
        features: makes what the update reads, [B, N, C], from the output; called only in layers that update. Default:
            the output over its root mean square. `lambda y: norm(x + y)` with the norm after attention is what the
            equitape decoder has.
        """
        self._check_input("x", x)
        holder = TupleCache(cache) if isinstance(cache, tuple) else cache
        past = self._past_length(holder, context)
        located = self._locate(x, positions, segment_ids, padding_mask, past)
        if state is None and not (self.layer > 0 and self.state_changes):
            state, located = self._start(located, x)
        self.check_state(state, x.shape[0], x.shape[1], x.dtype)
        other = self._context(x, context, context_state, context_positions)
        num_keys = self._num_keys(x, holder, past) if other is None else other.hidden.shape[1]
        allowed = self._mask(x, located, mask, past, num_keys, other)
        scaling = self.head_dim**-0.5 * self.model_encoding.score_scale
        found = self.attend(x, state, located, allowed, scaling, holder, self.layer, other)
        state = found.state
        if self.updates_state:
            read = self._features(found.output, features)
            state = self.encoding("update", state, found.attended_state, read, read)
        return (found.output, state, holder.held) if isinstance(holder, TupleCache) else (found.output, state)

    def _features(self, output: Tensor, features: Callable[[Tensor], Tensor] | None) -> Tensor:
        if features is None:
            return nn.functional.rms_norm(output, output.shape[-1:])
        made = features(output)
        if not isinstance(made, Tensor) or made.shape != output.shape:
            raise ValueError(f"What features returned {describe(made)}; it must be a tensor {list(output.shape)}.")
        return made

    def _check_input(self, name: str, x: Tensor) -> None:
        if not isinstance(x, Tensor) or x.dim() != 3 or x.shape[-1] != self.geometry.hidden_size:
            raise ValueError(f"{name} {describe(x)}; it must be a tensor [B, N, {self.geometry.hidden_size}].")
        if not x.numel():
            raise ValueError(f"{name} {describe(x)}; give at least one row and one token.")
        check_real(name, x.dtype)

    def _context(
        self, x: Tensor, context: Tensor | None, state: Tensor | None, positions: Tensor | Positions | None
    ) -> Context | None:
        if context is None:
            if state is not None or positions is not None:
                raise ValueError("context_state and context_positions belong to a context, which is missing; pass it.")
            return None
        self._check_input("context", context)
        if context.shape[0] != x.shape[0]:
            raise ValueError(f"context has {context.shape[0]} rows and x {x.shape[0]}; they must have equally many.")
        there = self._locate(context, positions)
        if state is None:
            state, there = self._start(there, context)
        self.check_state(state, context.shape[0], context.shape[1], context.dtype, "context_state")
        return Context(context, state, there)

    def _past_length(self, cache: Any, context: Tensor | None) -> int:
        if cache is None:
            return 0
        if not isinstance(cache, Cache | TupleCache):
            raise ValueError(f"cache is a {type(cache).__name__}; it must be transformers' Cache or a tuple.")
        refusal = self.model_encoding.cache_refusal
        if refusal is not None or self.model_encoding.keeps_sums:
            reason = refusal or "it continues running sums, which only the equitape decoder does"
            raise ValueError(f"Encoding {self.model_encoding.kind!r} cannot use a cache here: {reason}.")
        if self.model_encoding.keeps_numbers and is_quantised(cache):
            raise ValueError(
                f"Encoding {self.model_encoding.kind!r} keeps exact numbers in cached keys, which this cache would "
                f"round; use a dynamic or a static cache, or a tuple."
            )
        if context is not None:
            raise ValueError("A cache is for attention of a sequence to itself; pass either cache or context.")
        if not self.causal:
            raise ValueError("A cache needs causal attention: without it, a new token changes earlier states.")
        return int(cache.get_seq_length(self.layer))

    def _num_keys(self, x: Tensor, cache: Any, past: int) -> int:
        if cache is None or isinstance(cache, TupleCache):
            return past + x.shape[1]
        num_keys, first = cache.get_mask_sizes(x.shape[1], self.layer)
        if first:
            raise ValueError("The cache has dropped old tokens; use a cache without a sliding window.")
        return int(num_keys)

    def _locate(
        self,
        x: Tensor,
        positions: Tensor | Positions | None,
        segment_ids: Tensor | None = None,
        padding_mask: Tensor | None = None,
        past: int = 0,
    ) -> Positions:
        if not isinstance(positions, Positions):
            return locate(
                self.model_encoding, x, positions, segment_ids=segment_ids, padding_mask=padding_mask, past_length=past
            )
        if segment_ids is not None or padding_mask is not None:
            raise ValueError("Pass segment_ids and padding_mask to equitape.nn.locate, which made these positions.")
        return positions

    def _start(self, positions: Positions, x: Tensor) -> tuple[Tensor | None, Positions]:
        """The initial state of tokens, and their positions."""
        positions = self.model_encoding("map_ids", positions, x, None)
        return self.initial_state(positions, x.dtype), positions

    def _mask(
        self,
        x: Tensor,
        positions: Positions,
        given: Tensor | BlockMask | None,
        past: int,
        num_keys: int,
        context: Context | None,
    ) -> AttentionMask:
        biased = self.model_encoding.adds_bias
        if context is not None and self.model_encoding.needs_causal:
            raise ValueError(
                f"Encoding {self.model_encoding.kind!r} with these options needs causal attention and cannot attend to "
                f"a context; use 'rope' or 'tape' without decay."
            )
        ids = key_ids(positions.ids, past, 0, num_keys, None) if biased else None
        if given is not None:
            return AttentionMask(self._check_mask(given, x, num_keys), ids)
        padding = positions.valid if context is None else context.positions.valid
        if past and padding is not None:
            raise ValueError("Pass a mask instead of padding_mask with a cache: cached padding is not known here.")
        causal, window = (self.causal, self.window) if context is None else (False, None)
        if past and window is not None and positions.ids.dim() == 3:
            raise ValueError(
                "Pass a mask instead of a window on several axes with a cache: ids of cached tokens are not known here."
            )
        if past and x.shape[1] == 1 and num_keys == past + 1 and not biased and window is None:
            causal = False
        hides = padding is not None or window is not None or (context is None and positions.segments is not None)
        if not hides and not biased and self.implementation != "flex_attention":
            if not causal:
                return AttentionMask(causal=False)
            # torch takes one query without a mask to see all keys, also those that a static cache has no tokens for yet
            if self.implementation == "sdpa" and not past and (x.shape[1] > 1 or num_keys == 1):
                return AttentionMask()
        own = positions if context is None else positions._replace(segments=None)
        function = mask_function(own, x.shape[0], causal=causal, window=window)
        if past:
            function = behind(function, past)
        return AttentionMask(materialise(self.implementation, function, x, num_keys, padding), ids)

    def _check_mask(self, mask: Tensor | BlockMask, x: Tensor, num_keys: int) -> Tensor | BlockMask:
        if isinstance(mask, BlockMask):
            if "flex_attention" not in self.model_encoding.backends:
                raise ValueError(f"Encoding {self.model_encoding.kind!r} takes no BlockMask; pass a dense mask.")
            sizes = tuple(int(size) for size in mask.seq_lengths)
            if sizes != (x.shape[1], num_keys):
                raise ValueError(f"The BlockMask is for {sizes} queries and keys; there are {(x.shape[1], num_keys)}.")
            return mask
        full = mask[None, None] if mask.dim() == 2 else mask
        heads = (1, self.geometry.num_heads)
        if (
            full.dim() != 4
            or full.shape[0] not in (1, x.shape[0])
            or full.shape[1] not in heads
            or (list(full.shape[2:]) != [x.shape[1], num_keys])
        ):
            raise ValueError(
                f"mask has shape {list(mask.shape)}; it must be [{x.shape[1]}, {num_keys}] or [B, 1 or {heads[1]}, "
                f"{x.shape[1]}, {num_keys}]."
            )
        if full.dtype != torch.bool and not full.is_floating_point():
            raise ValueError(f"mask is {full.dtype}; it must be torch.bool (True attends), or {x.dtype} to be added.")
        return full


def rotary_options(kind: str, theta: float, scaling: Scaling | dict[str, Any] | None) -> dict[str, Any]:
    """An encoding with rotary frequencies."""
    given = scaling.to_dict() if isinstance(scaling, Scaling) else scaling
    return {"kind": kind, "theta": theta, **({} if given is None else {"scaling": given})}


class RotaryAttention(Attention):
    """Attention with RoPE, axial or mixed with several axes.

    scaling: of the frequencies, for example {"kind": "yarn", "factor": 4.0, "original_max_positions": 2048}
    (docs/reference/encodings/rope.md).
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        theta: float = 10000.0,
        scaling: Scaling | dict[str, Any] | None = None,
        **options: Unpack[LayerOptions],
    ):
        super().__init__(hidden_size, num_heads, rotary_options("rope", theta, scaling), **options)


class TapeAttention(Attention):
    """Attention with TAPE: a field of phasors that each layer updates by attention and content. It starts as RoPE.

    scaling: as in `RotaryAttention`; mixer_size, move, normalize, complex_mixing: as in the options of the encoding
    (docs/reference/encodings/tape.md).
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        theta: float = 10000.0,
        scaling: Scaling | dict[str, Any] | None = None,
        mixer_size: int | None = None,
        move: bool = False,
        normalize: bool = False,
        complex_mixing: bool = False,
        **options: Unpack[LayerOptions],
    ):
        chosen = {
            **rotary_options("tape", theta, scaling),
            "mixer_size": mixer_size,
            "move": move,
            "normalize": normalize,
            "complex_mixing": complex_mixing,
        }
        super().__init__(hidden_size, num_heads, chosen, **options)
