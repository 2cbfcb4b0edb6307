"""Blocks of Equitape models made of vLLM's linear layers, norms and paged attention, with equitape's encoding hooks.

vLLM's kernels take values as wide as keys. A widened value goes through several attention layers with the same key, in
parts of the width of the key: correct on every backend.

Shapes: N tokens of all requests in one row, H and G query and key-value heads of this rank, D head dimension, W width
of an attention layer, E columns added to the value.
"""

from copy import copy
from itertools import islice

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from vllm.config import VllmConfig
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
)
from vllm.model_executor.layers.activation import get_act_and_mul_fn
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear
from vllm.model_executor.models.llama import LlamaMLP
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.selector import get_attn_backend

from ..encodings import LayerEncoding, Positions
from ..encodings.heads import Columns
from ..encodings.values import rotate_back, rotate_values
from ..model import EquitapeConfig
from ..nn.backends import equal_parts
from ..nn.core import grow, rotate
from .sums import STEEPNESS, Sums

WIDEST = 512
NORMS = {
    "before": ("input_layernorm", None, "post_attention_layernorm", None),
    "after": (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    "both": (
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
    ),
}  # fmt: skip
"""Names of the norms before and after attention, before and after the feed-forward layer."""


def attention_width(needed: int, vllm_config: VllmConfig) -> int:
    """The smallest head size from `needed` on that vLLM's attention supports on this machine."""
    for width in range(-(-needed // 8) * 8, WIDEST + 1, 8):
        try:
            backend = get_attn_backend(width, torch.get_default_dtype(), vllm_config.cache_config.cache_dtype)
        except ValueError:
            continue
        if backend.supports_head_size(width):
            return width
    raise ValueError(f"vLLM has no attention for keys of width {needed} on this machine; use generate_batch.")


def make_norm(size: int, config: EquitapeConfig) -> nn.Module:
    """vLLM's norm; Gemma's adds 1 to its weight."""
    return (GemmaRMSNorm if config.norm_offset else RMSNorm)(size, eps=config.rms_norm_eps)


class EquitapeAttention(nn.Module):
    """Attention of one block, with one set of vLLM layers per loop."""

    def __init__(self, vllm_config: VllmConfig, encoding: LayerEncoding, width: int, scaling: float, prefix: str):
        super().__init__()
        config, quant = vllm_config.model_config.hf_config, vllm_config.quant_config
        self.ranks, rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
        self.dim, self.width, self.scaling, self.encoding = config.head_dim, width, scaling, encoding
        self.all_heads, self.all_groups = config.num_attention_heads, config.num_key_value_heads
        self.heads, self.groups = self.all_heads // self.ranks, max(1, self.all_groups // self.ranks)
        first = rank * self.all_groups // self.ranks
        self.own = slice(first, first + self.groups)
        self.own_heads = slice(rank * self.heads, (rank + 1) * self.heads)
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size, self.dim, self.all_heads, self.all_groups,
            bias=config.attention_bias, quant_config=quant, prefix=f"{prefix}.qkv_proj",
        )  # fmt: skip
        self.o_proj = RowParallelLinear(
            self.all_heads * self.dim, config.hidden_size,
            bias=config.attention_output_bias, quant_config=quant, prefix=f"{prefix}.o_proj",
        )  # fmt: skip
        self.joint = config.qk_norm_joint
        if config.qk_norm:
            sizes = [self.dim * (count if self.joint else 1) for count in (self.all_heads, self.all_groups)]
            self.q_norm, self.k_norm = (make_norm(size, config) for size in sizes)
        block, blocks = extract_layer_index(prefix), config.geometry.num_layers
        self.rotates = block not in (config.unrotated_layers or ())
        # of the heads whose values are rotated, those of this rank
        self.value_heads = min(max(encoding.value_heads - first, 0), self.groups) if self.rotates else 0
        parts = -(-config.value_cache_dims[block] // width)
        unlimited = copy(vllm_config.cache_config)
        unlimited.sliding_window = None

        def attention(loop: int, name: str, scale: float, plain: bool = True) -> Attention:
            slides = plain and config.layer_types[loop * blocks + block] == "sliding_attention"
            return Attention(
                self.heads, width, scale, num_kv_heads=self.groups, cache_config=unlimited, quant_config=quant,
                per_layer_sliding_window=config.sliding_window if slides else None,
                logits_soft_cap=config.attention_softcap if plain else None,
                prefix=f"{prefix}.{name}_loop{loop}",
            )  # fmt: skip

        self.parts = parts
        self.attn = nn.ModuleList(
            [attention(loop, f"attn_part{part}", scaling) for loop in range(config.num_loops) for part in range(parts)]
        )
        self.columns = getattr(encoding, "num_columns", 0)
        if encoding.keeps_sums:
            self.sums = nn.ModuleList(
                [
                    Sums(attention(loop, "sums", STEEPNESS, plain=False), self.heads, self.groups, width, self.columns)
                    for loop in range(config.num_loops)
                ]
            )

    def _sums(self, loop: int) -> Sums:
        layer = self.sums[loop]
        assert isinstance(layer, Sums)
        return layer

    def read_sums(self, positions: Positions, dtype: torch.dtype, loop: int) -> tuple[Tensor, Positions]:
        """Columns of the last cached key of each token's request, [1, all groups, N, E], and positions that know where
        requests start.
        """
        ids = positions.ids[0]
        found, first = self._sums(loop).read(ids, dtype)
        found = self._gather(found, self.all_groups)
        runs = torch.arange(ids.shape[0], device=ids.device) - (ids - first)
        return found.transpose(0, 1)[None], positions._replace(segments=runs[None])

    def forward(self, x: Tensor, state: Tensor | None, positions: Positions, loop: int) -> tuple[Tensor, Tensor | None]:
        """Returns the output [N, C] and the attention average of the added columns, [1, all heads, N, E] or None."""
        qkv, _ = self.qkv_proj(x)
        query, key, value = (
            part.unflatten(-1, (-1, self.dim))
            for part in qkv.split([self.heads * self.dim, self.groups * self.dim, self.groups * self.dim], dim=-1)
        )
        if self.joint:
            query = self._norm_heads(self.q_norm, query, self.all_heads, self.own_heads)
            key = self._norm_heads(self.k_norm, key, self.all_groups, self.own)
        elif hasattr(self, "q_norm"):
            query, key = self.q_norm(query.contiguous()), self.k_norm(key.contiguous())
        query = grow(query[None], positions)[0]
        if state is not None and state.shape[1] > self.groups:
            state = state[:, self.own]
        if self.value_heads:
            assert state is not None
            value = rotate_values(value.transpose(0, 1)[None], state, self.value_heads)[0].transpose(0, 1)
        carried = self.encoding("extra_values", state)
        added = self._columns(x, positions, value.dtype, loop) if self.columns else None
        query, key = query.transpose(0, 1)[None], key.transpose(0, 1)[None]
        if self.rotates:
            query, key = rotate(self.encoding, query, key, state, added)
        elif added is not None:
            query, key = added.put(query, key)
        query, key = query.to(value.dtype), key.to(value.dtype)
        query, key = (pad(y[0].transpose(0, 1), (0, self.width - y.shape[-1])).flatten(1) for y in (query, key))
        if carried is not None:
            value = torch.cat((value, carried[0].transpose(0, 1).expand(*value.shape[:2], -1).to(value.dtype)), dim=-1)
        layers = islice(self.attn, loop * self.parts, (loop + 1) * self.parts)
        parts = [
            layer(query, key, part.flatten(1)).unflatten(-1, (self.heads, self.width))
            for layer, part in zip(layers, equal_parts(value, self.width), strict=True)
        ]
        both = torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]
        own = both[..., : self.dim]
        if self.value_heads:
            assert state is not None
            own = rotate_back(own[None], state, self.value_heads * self.heads // self.groups)[0]
        output, _ = self.o_proj(own.flatten(1))
        if carried is None:
            return output, None
        attended = self._gather(both[..., self.dim : value.shape[-1]], self.all_heads)
        return output, attended.transpose(0, 1)[None]

    def _gather(self, x: Tensor, count: int) -> Tensor:
        """[N, heads or groups of this rank, D] -> [N, count, D]: those of all ranks."""
        if self.ranks == 1:
            return x
        # with fewer groups than ranks, neighbours hold the same one
        copies = self.ranks * x.shape[1] // count
        return tensor_model_parallel_all_gather(x.contiguous(), dim=1)[:, ::copies]

    def _norm_heads(self, norm: nn.Module, x: Tensor, count: int, own: slice) -> Tensor:
        """One norm over all heads, of all ranks."""
        normed: Tensor = norm(self._gather(x, count).flatten(1))
        return normed.unflatten(-1, (count, self.dim))[:, own]

    def _columns(self, x: Tensor, positions: Positions, dtype: torch.dtype, loop: int) -> Columns:
        """Decay and clock: columns of queries and keys, for the heads of this rank out of all."""
        last = None
        if self.encoding.keeps_sums:
            last, positions = self.read_sums(positions, dtype, loop)
        columns: Columns = self.encoding("columns", x[None], positions, last, dtype, self.scaling)
        if self.ranks > 1:
            of_key = columns.key.expand(-1, self.all_groups, -1, -1)[:, self.own]
            inside = columns.inside
            if inside is not None:
                inside = min(max(inside - self.own.start, 0), self.groups)
            columns = columns._replace(query=columns.query[:, self.own_heads], key=of_key, inside=inside)
        if self.encoding.keeps_sums:
            new = columns.key.expand(-1, self.groups, x.shape[0], -1)[0].transpose(0, 1)
            new = self._sums(loop).write(positions.ids[0], new).transpose(0, 1)[None]
            columns = columns._replace(key=new)
        return columns


class EquitapeBlock(nn.Module):
    """(tokens, state) -> (tokens, state)."""

    def __init__(self, vllm_config: VllmConfig, encoding: LayerEncoding, width: int, scaling: float, prefix: str):
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.self_attn = EquitapeAttention(vllm_config, encoding, width, scaling, f"{prefix}.self_attn")
        self.mlp = LlamaMLP(
            config.hidden_size, config.intermediate_size, "silu", vllm_config.quant_config,
            bias=config.mlp_bias, prefix=f"{prefix}.mlp",
        )  # fmt: skip
        self.mlp.act_fn = get_act_and_mul_fn(config.hidden_act)
        self.norms = NORMS[config.norms]
        for name in filter(None, self.norms):
            setattr(self, name, make_norm(config.hidden_size, config))

    def forward(self, x: Tensor, state: Tensor | None, positions: Positions, loop: int) -> tuple[Tensor, Tensor | None]:
        output, attended = self.self_attn(self._norm(0, x), state, positions, loop)
        x = x + self._norm(1, output)
        normed = self._norm(2, x)
        fed = self._norm(3, self.mlp(normed))
        return x + fed, self.self_attn.encoding("update", state, attended, normed[None], fed[None])

    def _norm(self, place: int, x: Tensor) -> Tensor:
        name = self.norms[place]
        return x if name is None else getattr(self, name)(x)
