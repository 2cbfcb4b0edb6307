"""Attention with a value widened by the positional state, through transformers' attention implementations.

Shapes: B batch, N tokens, K keys, H query heads, G key-value heads, D head dimension, E extra value columns.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..encodings import LayerEncoding, Positions
from .backends import cuda_attention, eager_attention, flexible_attention
from .configuration import EquitapeConfig

PlainAttention = Callable[[Tensor, Tensor, Tensor, Tensor | BlockMask | None], Tensor]
"""The configured attention: query [B, H, N, D], key [B, G, N, D], value [B, G, N, E] and mask -> [B, N, H, E]."""


class AttentionMask(NamedTuple):
    """Which tokens each token of this call attends to, for one layer type."""

    mask: Tensor | BlockMask | None = None
    """Boolean or additive [B, 1 or H, N, K], FlexAttention's block mask, or None for plain causal attention."""
    key_ids: Tensor | None = None
    """[B, K], the ids of the keys, for encodings that bias scores."""
    attend: Callable[[PlainAttention, Tensor, Tensor, Tensor], Tensor] | None = None
    """Replaces the attention call: receives that call, query, key and value, and may call it on parts."""


class EquitapeRMSNorm(nn.Module):
    """x / rms(x) * weight, computed in float32."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class EquitapeAttention(nn.Module):
    """Grouped-query attention. The encoding rotates queries and keys, biases scores, and appends its state to the
    value.
    """

    def __init__(self, config: EquitapeConfig, layer_idx: int, encoding: LayerEncoding):
        super().__init__()
        assert config.head_dim is not None and config.num_key_value_heads is not None
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.attention_dropout = config.attention_dropout
        self.is_causal = True
        self.encoding = encoding
        width, bias = config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(width, config.num_attention_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(
            config.num_attention_heads * self.head_dim, width, bias=bool(config.attention_output_bias)
        )
        if config.qk_norm:
            self.q_norm = EquitapeRMSNorm(self.head_dim, config.rms_norm_eps)
            self.k_norm = EquitapeRMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(
        self,
        hidden_states: Tensor,
        state: Tensor | None,
        positions: Positions,
        attention_mask: AttentionMask,
        scaling: float,
        past_key_values: Cache | None = None,
        cache_layer: int = 0,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Returns the output [B, N, C], the attention weights if the implementation returns them, the attention average
        of the encoding's columns ([B, H, N, E] or None), and the state to update.
        """
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query = self.q_proj(hidden_states).view(shape)
        key = self.k_proj(hidden_states).view(shape)
        value = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        if self.config.qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        columns: Tensor | None = self.encoding("extra_values", state)
        if columns is not None:
            is_state = columns is state and columns.requires_grad and columns.dtype == value.dtype
            # autocast may give the value another dtype than the state
            columns = columns.expand(value.shape[0], -1, -1, -1).to(value.dtype)
            value = torch.cat((value, columns), dim=-1)
            if is_state:
                # attention saves the widened value for backward: reading the state from it avoids a second copy
                state = value[..., self.head_dim :]
        query, key = self.encoding("rotate", query.transpose(1, 2), key.transpose(1, 2), state)
        # under autocast, a float32 state may have made these float32; kernel and cache follow the dtype of the value
        query, key = query.to(value.dtype), key.to(value.dtype)
        last_key = last_cached_key(past_key_values, cache_layer, positions)
        query, key = self.encoding("add_columns", query, key, hidden_states, positions, last_key, scaling)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, cache_layer)

        output, weights = attend(self, query, key, value, state, positions, attention_mask, scaling, **kwargs)
        # output [B, N, H, D + E]
        attended_state = None
        if columns is not None:
            output, attended_state = output.split((self.head_dim, columns.shape[-1]), dim=-1)
            attended_state = attended_state.transpose(1, 2)
        return self.o_proj(output.flatten(2)), weights, attended_state, state


def last_cached_key(past: Cache | None, cache_layer: int, positions: Positions) -> Tensor | None:
    """The last cached non-padding key, [B, G, D + E], zeros for none; None if not needed."""
    if past is None or positions.last_key is None or cache_layer >= len(past.layers):
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


def attend(
    module: EquitapeAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: Tensor | None,
    positions: Positions,
    attention_mask: AttentionMask,
    scaling: float,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """One attention call with the configured implementation. Returns [B, N, H, D + E] and the weights, if any."""
    implementation = module.config._attn_implementation
    dropout = module.attention_dropout if module.training else 0.0
    mask = attention_mask.mask
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
        score_mod = None
        if attention_mask.key_ids is not None:
            score_mod = module.encoding("score_mod", state, positions, attention_mask.key_ids)
        return flexible_attention(query, key, value, mask, score_mod, scaling), None
    if attention_mask.key_ids is not None:
        assert mask is not None
        visible = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
        bias = module.encoding("bias", query, key, state, positions, attention_mask.key_ids, visible, scaling)
        if bias is not None:
            hidden = torch.finfo(query.dtype).min
            additive = bias.to(query.dtype) if mask.dtype == torch.bool else bias.to(query.dtype) + mask
            # an encoding may leave heads last in memory, which no fused kernel accepts
            mask = torch.where(visible, additive, hidden).contiguous()
    if implementation == "sdpa" and query.is_cuda:
        return cuda_attention(query, key, value, mask, dropout, scaling), None
    function = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention)
    # the CPU's fused kernel needs a value no wider than the key; calls with dropout must drop the same weights
    if implementation == "sdpa" and query.device.type == "cpu" and value.shape[-1] > key.shape[-1] and not dropout:
        parts = [
            function(module, query, key, part, mask, scaling=scaling, **kwargs)[0]
            for part in value.split(key.shape[-1], dim=-1)
        ]
        return torch.cat(parts, dim=-1), None
    return function(module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs)
