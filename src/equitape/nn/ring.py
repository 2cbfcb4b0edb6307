"""Causal attention over rows that are split over processes: torch's ring attention, with a value wider than the key.

`torch.distributed.tensor.experimental.context_parallel` replaces scaled_dot_product_attention on CUDA only and knows
neither grouped heads nor wider values. Its ring takes any kernel that returns log-sums, so it is called here directly.

Shapes: B batch, N tokens of this process, H query heads, G key-value heads, W width of query and key, E of the value.
"""

from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..encodings.shards import Shards
from .backends import HALF_PRECISION

ENGINE = "torch.distributed.tensor.experimental._context_parallel._attention"
SEQUENCE = 2
"""The axis of tokens."""


@cache
def load_engine() -> Any:
    """torch's ring attention, which takes half a second to import."""
    return import_module(ENGINE)


class _Mesh(NamedTuple):
    """The part of a DeviceMesh that torch's ring reads."""

    group: Any

    def get_group(self) -> Any:
        return self.group


def ring_attention(shards: Shards, scaling: float, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of this process's tokens to all earlier ones of their rows: [B, N, H, E].

    query: [B, H, N, W]; key: [B, G, N, W]; value: [B, G, N, E]. Kernels take values as wide as keys, so a wider one
    goes around the ring in parts.
    """
    if query.is_cuda and query.dtype not in HALF_PRECISION:
        raise ValueError(f"Ring attention on CUDA needs bfloat16 or float16, not {query.dtype}; use precision bf16.")
    ratio = query.shape[1] // key.shape[1]
    if query.is_cuda and ratio > 1:
        # the flash kernel has no grouped heads
        key, value = key.repeat_interleave(ratio, dim=1), value.repeat_interleave(ratio, dim=1)
    width, columns = key.shape[-1], value.shape[-1]
    missing = -columns % width
    if missing:
        value = torch.nn.functional.pad(value, (0, missing))
    parts = [_Ring.apply(query, key, part, shards.group, scaling) for part in value.split(width, dim=-1)]
    return torch.cat(parts, dim=-1)[..., :columns].transpose(1, 2)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, group: Any, scaling: float) -> Tensor:
        engine = load_engine()
        if query.is_cuda:
            output, sums, *rest = engine._scaled_dot_product_ring_flash_attention(
                _Mesh(group), query, key, value, is_causal=True, scale=scaling
            )
            ctx.rest = rest[:6]
        else:
            output, sums, *_ = engine._templated_ring_attention(
                group,
                SEQUENCE,
                torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
                query=query,
                key=key,
                value=value,
                is_causal=True,
                dropout_p=0.0,
                scale=scaling,
            )
        ctx.save_for_backward(query, key, value, output, sums)
        ctx.group, ctx.scaling = group, scaling
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, sums = ctx.saved_tensors
        gradient, engine = gradient.contiguous(), load_engine()
        if query.is_cuda:
            cum_query, cum_key, max_query, max_key, seed, offset = ctx.rest
            found = engine._scaled_dot_product_ring_flash_attention_backward(
                _Mesh(ctx.group), gradient, query, key, value, output, sums, cum_query, cum_key, max_query, max_key,
                0.0, True, seed, offset, scale=ctx.scaling,
            )  # fmt: skip
        else:
            found = engine._templated_ring_attention_backward(
                ctx.group,
                SEQUENCE,
                torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
                grad_out=gradient,
                grad_out_name="grad_out",
                query=query,
                key=key,
                value=value,
                out=output,
                logsumexp=sums,
                is_causal=True,
                dropout_p=0.0,
                scale=ctx.scaling,
            )
        return found[0], found[1], found[2], None, None
