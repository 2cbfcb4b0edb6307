"""Causal attention over rows that are split over processes: torch's ring attention, with a value wider than the key.

`torch.distributed.tensor.experimental.context_parallel` replaces scaled_dot_product_attention on CUDA only and knows
neither grouped heads nor wider values. Its ring takes any kernel that returns log-sums, so it is called here directly,
with a kernel that knows both.

Shapes: B batch, N tokens of this process, H query heads, G key-value heads, W width of query and key, E of the value.
"""

from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ..encodings.shards import Shards
from .backends import HALF_PRECISION, equal_parts

ENGINE = "torch.distributed.tensor.experimental._context_parallel._attention"
aten = torch.ops.aten
SEQUENCE = 2
"""The axis of tokens."""


@cache
def load_engine() -> Any:
    """torch's ring attention, which takes half a second to import."""
    return import_module(ENGINE)


def ring_attention(shards: Shards, scaling: float, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of this process's tokens to all earlier ones of their rows: [B, N, H, E].

    query: [B, H, N, W]; key: [B, G, N, W]; value: [B, G, N, E].
    """
    if query.is_cuda and query.dtype not in HALF_PRECISION:
        raise ValueError(f"Ring attention on CUDA needs bfloat16 or float16, not {query.dtype}; use precision bf16.")
    output: Tensor = _Ring.apply(query, key, value, shards.group, scaling)
    return output.transpose(1, 2)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, group: Any, scaling: float) -> Tensor:
        output, sums, *rest = load_engine()._templated_ring_attention(
            group, SEQUENCE, attend, query=query, key=key, value=value, is_causal=True, scale=scaling
        )
        ctx.save_for_backward(query, key, value, output, sums)
        ctx.group, ctx.scaling, ctx.rest = group, scaling, rest
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, sums = ctx.saved_tensors
        found = load_engine()._templated_ring_attention_backward(
            ctx.group,
            SEQUENCE,
            attend_backward,
            grad_out=gradient.contiguous(),
            grad_out_name="gradient",
            query=query,
            key=key,
            value=value,
            out=output,
            logsumexp=sums,
            is_causal=True,
            scale=ctx.scaling,
            rest=ctx.rest,
        )
        return found[0], found[1], found[2], None, None


def attend(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float) -> tuple[Any, ...]:
    """torch's flash kernel on what a process holds at the moment: output, log-sums, and what its backward needs.

    It takes values as wide as keys, so a wider one takes several calls; the ring sends it only once.
    """
    key, value = _share_heads(query, key), _share_heads(query, value)
    outputs = []
    for part in equal_parts(value, key.shape[-1]):
        if query.is_cuda:
            found = aten._scaled_dot_product_flash_attention(query, key, part, 0.0, is_causal, scale=scale)
        else:
            found = aten._scaled_dot_product_flash_attention_for_cpu(query, key, part, 0.0, is_causal, scale=scale)
        outputs.append(found[0])
    return torch.cat(outputs, dim=-1)[..., : value.shape[-1]], *found[1:8]


def attend_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    is_causal: bool,
    scale: float,
    gradient: Tensor,
    rest: list[Any],
) -> tuple[Tensor, ...]:
    """Gradients of query, key and value. The weights are the same in all calls, so their gradients add up."""
    width, groups = key.shape[-1], key.shape[1]
    shared, shared_value = _share_heads(query, key), _share_heads(query, value)
    parts = [equal_parts(x, width) for x in (gradient, shared_value, out)]
    found = []
    for grad, part, output in zip(*parts, strict=True):
        given = (grad.contiguous(), query, shared, part, output.contiguous(), logsumexp)
        if query.is_cuda:
            lengths, (seed, offset) = rest[:4], rest[4:6]
            found.append(
                aten._scaled_dot_product_flash_attention_backward(
                    *given, *lengths, 0.0, is_causal, seed, offset, scale=scale
                )
            )
        else:
            found.append(aten._scaled_dot_product_flash_attention_for_cpu_backward(*given, 0.0, is_causal, scale=scale))
    queries, keys, values = zip(*(each[:3] for each in found), strict=True)
    grad_key = sum(keys).unflatten(1, (groups, -1)).sum(2)
    grad_value = torch.cat(values, dim=-1)[..., : value.shape[-1]].unflatten(1, (groups, -1)).sum(2)
    return sum(queries), grad_key, grad_value


def _share_heads(query: Tensor, x: Tensor) -> Tensor:
    """Keys or values for every query head on CUDA, whose flash kernel has no grouped heads."""
    ratio = query.shape[1] // x.shape[1]
    return x.repeat_interleave(ratio, dim=1) if query.is_cuda and ratio > 1 else x
