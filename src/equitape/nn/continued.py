"""Causal attention of new tokens to cached ones and to themselves, without a mask.

A mask of N new tokens over K keys takes N K numbers, and no fused kernel of torch takes a wider value and causality
that is aligned to the last key. So attention runs twice, over the cached keys without causality and over the new ones
with it, and both results are joined by the sums of their exponentials.

Shapes: B batch, N new tokens, K keys, H query heads, G key-value heads, D width of a key, E width of a value.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

Part = Callable[[Tensor, Tensor, Tensor, bool, float], tuple[Tensor, Tensor]]
"""(query, key, value, causal, scaling) -> output [B, H, N, E], logarithm of the sum of exponentials [B, H, N], in
float32 at least."""
TOLERANCE = 0.05
"""Largest error of a probe, whose outputs are of order one, in half precision."""


def continued_attention(query: Tensor, key: Tensor, value: Tensor, scaling: float, part: Part | None = None) -> Tensor:
    """[B, N, H, E]: attention of the last N of K tokens. part: makes each half; default: cuDNN's kernel."""
    part = part or fused_part
    past = key.shape[2] - query.shape[2]
    cached, new = (key[:, :, :past], value[:, :, :past]), (key[:, :, past:], value[:, :, past:])
    one, one_sum = part(query, *cached, False, scaling)
    two, two_sum = part(query, *new, True, scaling)
    share = torch.sigmoid(one_sum - two_sum)[..., None]
    return two.to(share.dtype).lerp(one.to(share.dtype), share).to(query.dtype).transpose(1, 2)


def fused_part(query: Tensor, key: Tensor, value: Tensor, causal: bool, scaling: float) -> tuple[Tensor, Tensor]:
    """By cuDNN, which takes grouped heads and a wider value in half precision."""
    output, sums, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, True, 0.0, causal, False, scale=scaling
    )
    return output, sums.reshape(query.shape[:3])


def exact_part(query: Tensor, key: Tensor, value: Tensor, causal: bool, scaling: float) -> tuple[Tensor, Tensor]:
    """By all scores, in float32 at least."""
    ratio, wide = query.shape[1] // key.shape[1], torch.promote_types(query.dtype, torch.float32)
    key, value = (each.to(wide).repeat_interleave(ratio, dim=1) for each in (key, value))
    scores = scaling * query.to(wide) @ key.transpose(-1, -2)
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


@cache
def is_right(device: torch.device, dtype: torch.dtype, heads: tuple[int, int], widths: tuple[int, int]) -> bool:
    """Try a small input of that kind: a kernel that is missing or ends in another way is not used."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(count: int, tokens: int, width: int) -> Tensor:
        return torch.randn(1, count, tokens, width, device=device, generator=generator).to(dtype)

    query, key, value = draw(heads[0], 128, widths[0]), draw(heads[1], 384, widths[0]), draw(heads[1], 384, widths[1])
    scaling = widths[0] ** -0.5
    try:
        found = continued_attention(query, key, value, scaling)
    except RuntimeError:
        return False
    wanted = continued_attention(query, key, value, scaling, exact_part)
    return bool((found.float() - wanted.float()).abs().max() < TOLERANCE)
