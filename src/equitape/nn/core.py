"""The attention of every layer, ours and others': projections, an encoding's hooks, one attention call.

Shapes: B batch, N tokens, K keys, H query heads, G key-value heads, D head dimension, E extra value columns, C hidden
size.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.checkpoint import checkpoint
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..encodings import LayerEncoding, Positions
from ..encodings.heads import Columns, side_by_side
from ..encodings.values import rotate_back, rotate_values
from .backends import cuda_attention, eager_attention, flexible_attention
from .continued import continued_attention
from .norm import RMSNorm

PlainAttention = Callable[[Tensor, Tensor, Tensor, Tensor | BlockMask | None], Tensor]
"""The configured attention: query [B, H, N, D], key [B, G, N, D], value [B, G, N, E] and mask -> [B, N, H, E]."""

# a bias on the scores whose making takes more memory than the first is made in blocks that take about the second: few,
# since each is compiled by itself and PaTH begins anew in each
MAX_BIAS_BYTES = 2**31
BLOCK_BIAS_BYTES = 2**30


class AttentionMask(NamedTuple):
    """Which tokens each token of this call attends to, for one layer type."""

    mask: Tensor | BlockMask | None = None
    """Boolean or additive [B, 1 or H, N, K], FlexAttention's block mask, or None: see `causal`."""
    key_ids: Tensor | None = None
    """[B, K], the ids of the keys, for encodings that bias scores."""
    attend: Callable[[PlainAttention, Tensor, Tensor, Tensor], Tensor] | None = None
    """Replaces the attention call: receives that call, query, key and value, and may call it on parts."""
    causal: bool = True
    """Whether a mask of None means causal attention; otherwise all tokens attend to all."""
    continued: bool = False
    """Whether cached keys come before those of this call: a mask of None is then causal from the last key on."""
    rows: Callable[[int, int], Tensor] | None = None
    """For encodings that bias scores, instead of a large causal mask: (begin, end) makes the mask of these queries and
    the keys before the end.
    """

    def part(self, begin: int, end: int) -> "AttentionMask":
        """The mask of some queries as a tensor; one made by `rows` ends with their last key."""
        if self.rows is not None:
            assert self.key_ids is not None
            return AttentionMask(self.rows(begin, end), self.key_ids[:, :end])
        assert isinstance(self.mask, Tensor)
        return AttentionMask(self.mask if self.mask.shape[2] == 1 else self.mask[:, :, begin:end], self.key_ids)


class KeyValueCache(Protocol):
    """The part of transformers' Cache that attention uses."""

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Add keys and values of new tokens; returns those of all tokens."""


@runtime_checkable
class SequenceCache(Protocol):
    """A cache whose rows hold several sequences, and which reads the last key of each."""

    def last_key(self, layer: int) -> Tensor | None:
        """The last cached key of each token's sequence, [B, G, N, D + E], zeros for none; None if none is cached."""


class Context(NamedTuple):
    """The other sequence of a cross-attention, which keys and values come from."""

    hidden: Tensor
    """[B, K, C]."""
    state: Tensor | None
    positions: Positions


class Attended(NamedTuple):
    """What attention returns."""

    output: Tensor
    """[B, N, C]."""
    weights: Tensor | None
    """[B, H, N, K] if the implementation returns them."""
    attended_state: Tensor | None
    """[B, H, N, E]: the attention average of the encoding's columns."""
    state: Tensor | None
    """The state to update."""


def is_quantised(past: Any) -> bool:
    """Whether a layer of a cache rounds its keys and values to a few bits."""
    return any("Quantized" in type(layer).__name__ for layer in getattr(past, "layers", ()))


def describe(given: Any) -> str:
    """The shape of a tensor, or what was given in its place, for errors."""
    return f"has shape {list(given.shape)}" if isinstance(given, Tensor) else f"is a {type(given).__name__}"


def widen(value: Tensor, columns: Tensor | None) -> Tensor:
    """Append an encoding's columns [B or 1, G, K, E] to the value: [B, G, K, D] -> [B, G, K, D + E]."""
    if columns is None:
        return value
    if columns.dim() != 4 or columns.shape[1:3] != value.shape[1:3] or columns.shape[0] not in (1, value.shape[0]):
        raise ValueError(
            f"value {describe(value)}, and the columns to append {list(columns.shape)}; all but the last size must be "
            f"equal."
        )
    # autocast may give the value another dtype than the state
    columns = columns.expand(value.shape[0], -1, -1, -1).to(value.dtype)
    return side_by_side(value, columns)


def split(output: Tensor, head_dim: int | None = None) -> tuple[Tensor, Tensor]:
    """Split what attention made of a widened value [..., D + E]: output [..., D] and carried columns [..., E].

    head_dim: D. Default: half of the width, which is right for TAPE's field.
    """
    width = output.shape[-1]
    if head_dim is None:
        if width % 2:
            raise ValueError(
                f"The output has width {width}, which is not head_dim twice; pass the head_dim, the width of the value "
                f"before it was widened."
            )
        head_dim = width // 2
    own, carried = output.split((head_dim, width - head_dim), dim=-1)
    return own, carried


class AttentionCore(nn.Module):
    """Grouped-query attention. The encoding rotates queries and keys, biases scores, and appends its state to the
    value.
    """

    implementation: str
    """Name of the attention implementation: "sdpa", "eager", "flex_attention" or another of transformers' table."""

    def __init__(
        self,
        encoding: LayerEncoding,
        *,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        bias: bool = False,
        output_bias: bool = False,
        qk_norm: bool = False,
        qk_norm_joint: bool = False,
        norm_eps: float = 1e-6,
        norm_offset: float = 0.0,
        rotates: bool = True,
        dropout: float = 0.0,
    ):
        """qk_norm_joint: one norm over all heads. rotates: False leaves out the encoding's rotation."""
        super().__init__()
        self.head_dim = head_dim
        self.value_dim = head_dim - encoding.value_room
        self.rotates = rotates
        self.value_heads = encoding.value_heads if rotates else 0
        self.qk_norm_joint = qk_norm_joint
        # these names are read by transformers' attention functions
        self.num_key_value_groups = num_heads // num_kv_heads
        self.attention_dropout = dropout
        self.is_causal = True
        self.encoding = encoding
        self.qk_norm = qk_norm
        self.q_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * self.value_dim, bias=bias)
        self.o_proj = nn.Linear(num_heads * self.value_dim, hidden_size, bias=output_bias)
        if qk_norm:
            widths = [head_dim * (count if qk_norm_joint else 1) for count in (num_heads, num_kv_heads)]
            self.q_norm, self.k_norm = (RMSNorm(width, norm_eps, norm_offset) for width in widths)

    def attend(
        self,
        hidden_states: Tensor,
        state: Tensor | None,
        positions: Positions,
        attention_mask: AttentionMask,
        scaling: float,
        past_key_values: KeyValueCache | None = None,
        cache_layer: int = 0,
        context: Context | None = None,
        **kwargs: Any,
    ) -> Attended:
        """Attention of hidden_states [B, N, C] to themselves, or to a context."""
        source = hidden_states if context is None else context.hidden
        query = self.q_proj(hidden_states).view(*hidden_states.shape[:-1], -1, self.head_dim)
        key = self.k_proj(source).view(*source.shape[:-1], -1, self.head_dim)
        value = self.v_proj(source).view(*source.shape[:-1], -1, self.value_dim).transpose(1, 2)
        if self.qk_norm and self.qk_norm_joint:
            query = self.q_norm(query.flatten(-2)).view_as(query)
            key = self.k_norm(key.flatten(-2)).view_as(key)
        elif self.qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        query = grow(query, positions)
        key_state = state if context is None else context.state
        if self.value_heads:
            assert key_state is not None
            value = rotate_values(value, key_state, self.value_heads)
        columns: Tensor | None = self.encoding("extra_values", key_state)
        value = widen(value, columns)
        query, key = query.transpose(1, 2), key.transpose(1, 2)
        if context is not None:
            query, key = self._rotate_apart(query, key, state, key_state) if self.rotates else (query, key)
        else:
            last_key = last_cached_key(past_key_values, cache_layer, positions)
            added: Columns | None = self.encoding("columns", hidden_states, positions, last_key, value.dtype, scaling)
            if not self.rotates:
                query, key = (query, key) if added is None else added.put(query, key)
            else:
                if columns is not None and columns is state and columns.requires_grad and columns.dtype == value.dtype:
                    # attention saves the widened value for backward: reading the state from it avoids a second copy
                    state = value[..., self.value_dim :]
                query, key = rotate(self.encoding, query, key, state, added)
        # under autocast, a float32 state may have made these float32; kernel and cache follow the dtype of the value
        query, key = query.to(value.dtype), key.to(value.dtype)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, cache_layer)

        output, weights = attend(self, query, key, value, state, positions, attention_mask, scaling, **kwargs)
        # output [B, N, H, D + E]
        carried = None
        if columns is not None:
            output, carried = split(output, self.value_dim)
            carried = carried.transpose(1, 2)
        if self.value_heads:
            assert state is not None
            output = rotate_back(output, state, self.value_heads * self.num_key_value_groups)
        return Attended(self.o_proj(output.flatten(2)), weights, carried, state)

    def _rotate_apart(
        self, query: Tensor, key: Tensor, state: Tensor | None, key_state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys of two sequences, each by its own state. The hook rotates pairs, so each comes with
        a partner whose result is dropped.
        """
        query, _ = self.encoding("rotate", query, query[:, : key.shape[1]], state)
        _, key = self.encoding("rotate", key, key, key_state)
        return query, key


def rotate(
    encoding: LayerEncoding, query: Tensor, key: Tensor, state: Tensor | None, columns: Columns | None
) -> tuple[Tensor, Tensor]:
    """Rotated queries and keys, with columns if there are any."""
    if columns is None:
        return encoding("rotate", query, key, state)
    return encoding("rotate_with_columns", query, key, state, columns)


def last_cached_key(past: Any, cache_layer: int, positions: Positions) -> Tensor | None:
    """The last cached non-padding key, [B, G, D + E], zeros for none; None if not needed.

    A cache of several sequences per row returns that of each token's sequence, [B, G, N, D + E].
    """
    if past is None or positions.last_key is None:
        return None
    if isinstance(past, SequenceCache):
        return past.last_key(cache_layer)
    if cache_layer >= len(past.layers):
        return None
    keys = past.layers[cache_layer].keys
    if keys is None or not keys.numel():
        return None
    # a sliding window holds only the newest tokens
    seen = past.get_seq_length(cache_layer)
    dropped = (seen - keys.shape[2]).clamp(min=0) if isinstance(seen, Tensor) else max(seen - keys.shape[2], 0)
    index = positions.last_key - dropped
    place = index.clamp(min=0)[:, None, None, None].expand(keys.shape[0], keys.shape[1], 1, keys.shape[3])
    return keys.gather(2, place)[:, :, 0] * (index >= 0)[:, None, None]


def bias_bytes(encoding: LayerEncoding, query: Tensor, key: Tensor) -> float:
    """Memory that it takes to make a bias on all scores."""
    scores = query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2]
    return encoding.bias_copies * scores * query.element_size()


def grow(query: Tensor, positions: Positions) -> Tensor:
    """Queries [B, N, H, D] times the factor of their positions, if there is one."""
    if positions.query_factor is None:
        return query
    return (query * positions.query_factor[..., None, None]).to(query.dtype)


def attend_in_blocks(
    module: AttentionCore,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: Tensor | None,
    positions: Positions,
    attention_mask: AttentionMask,
    scaling: float,
    **kwargs: Any,
) -> Tensor:
    """`attend` for some queries after others, since a bias on all scores would not fit: [B, N, H, D + E].

    The backward pass computes the bias of each block again.
    """
    num_tokens = query.shape[2]
    size = max(1, int(BLOCK_BIAS_BYTES * num_tokens / bias_bytes(module.encoding, query, key)))
    ids = positions.ids.expand(-1, num_tokens)

    def part(begin: int, query: Tensor, key: Tensor, value: Tensor, state: Tensor | None) -> Tensor:
        end = min(begin + size, num_tokens)
        some = attention_mask.part(begin, end)
        assert isinstance(some.mask, Tensor)
        seen = some.mask.shape[-1]
        where = positions._replace(ids=ids[:, begin:end])
        keys, values = key[:, :, :seen], value[:, :, :seen]
        return attend(module, query[:, :, begin:end], keys, values, state, where, some, scaling, **kwargs)[0]

    trained = torch.is_grad_enabled() and query.requires_grad
    outputs = [
        checkpoint(part, begin, query, key, value, state, use_reentrant=False)
        if trained
        else part(begin, query, key, value, state)
        for begin in range(0, num_tokens, size)
    ]
    return torch.cat(outputs, dim=1)


def attend(
    module: AttentionCore,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: Tensor | None,
    positions: Positions,
    attention_mask: AttentionMask,
    scaling: float,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """One attention call with the chosen implementation. Returns [B, N, H, D + E] and the weights, if any."""
    implementation = module.implementation
    dropout = module.attention_dropout if module.training else 0.0
    mask = attention_mask.mask
    if attention_mask.continued:
        return continued_attention(query, key, value, scaling), None
    if attention_mask.attend is not None:

        def plain(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | BlockMask | None) -> Tensor:
            # transformers would compare lengths, which is not a plain bool under torch.compile with dynamic lengths
            causal = {"is_causal": True} if mask is None else {}
            own = AttentionMask(mask)
            return attend(module, query, key, value, state, positions, own, scaling, **causal, **kwargs)[0]

        return attention_mask.attend(plain, query, key, value), None
    if isinstance(mask, BlockMask):
        if dropout:
            raise ValueError("FlexAttention does not support dropout; set attention_dropout to 0 or use 'sdpa'.")
        score_mod = options = None
        if attention_mask.key_ids is not None:
            score_mod = module.encoding("score_mod", state, positions, attention_mask.key_ids)
            options = module.encoding.kernel_options
        return flexible_attention(query, key, value, mask, score_mod, scaling, options), None
    if attention_mask.key_ids is not None:
        large = bias_bytes(module.encoding, query, key) > MAX_BIAS_BYTES
        if implementation == "sdpa" and query.shape[2] > 1 and large:
            return attend_in_blocks(
                module, query, key, value, state, positions, attention_mask, scaling, **kwargs
            ), None
        mask = mask if attention_mask.rows is None else attention_mask.rows(0, query.shape[2])
        assert isinstance(mask, Tensor)
        visible = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
        bias = module.encoding("bias", query, key, state, positions, attention_mask.key_ids, visible, scaling)
        if bias is not None:
            hidden = torch.finfo(query.dtype).min
            additive = bias.to(query.dtype) if mask.dtype == torch.bool else bias.to(query.dtype) + mask
            # an encoding may leave heads last in memory, which no fused kernel accepts
            mask = torch.where(visible, additive, hidden).contiguous()
    if implementation == "sdpa" and query.is_cuda:
        return cuda_attention(query, key, value, mask, dropout, scaling, attention_mask.causal), None
    if not attention_mask.causal:
        kwargs["is_causal"] = False
    function = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention)
    # the CPU's fused kernel needs a value no wider than the key; calls with dropout must drop the same weights
    if implementation == "sdpa" and query.device.type == "cpu" and value.shape[-1] > key.shape[-1] and not dropout:
        if query.shape[2] == 1:
            # two products take less time than two calls
            return eager_attention(module, query, key, value, mask, scaling)[0], None
        parts = [
            function(module, query, key, part, mask, scaling=scaling, **kwargs)[0]
            for part in value.split(key.shape[-1], dim=-1)
        ]
        return torch.cat(parts, dim=-1), None
    return function(module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs)
