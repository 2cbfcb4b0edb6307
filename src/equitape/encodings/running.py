"""Running sums over tokens, and float32 numbers stored exactly in half-precision key columns.

A cache holds only keys and values. A running sum that must continue from a cache is therefore stored in extra columns
of the key, as three numbers of the key's dtype that add up to the float32 sum.

Shapes: B batch, N tokens, G key-value heads.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from .positions import Positions, cumulative_sum, run_starts

PARTS = 3
"""Parts of one float32: three times 8 bits of bfloat16 hold its 24 bits."""
COLUMN_UNIT = 64.0
"""Columns hold numbers in this unit, so that float16 covers positions up to 4 million."""
LOW_BITS = {torch.bfloat16: ~0xFFFF, torch.float16: ~0x1FFF}
"""Masks of the bits of a float32 that half-precision dtypes hold."""


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Compute in the dtypes given: sums in half precision would be wrong. The meta device has no autocast."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def running_sum(increments: Tensor, positions: Positions, previous: Tensor | None) -> Tensor:
    """Sums over all tokens up to each one: [B, G, N] in float32.

    Padding adds nothing, every packed sequence starts at zero, and a cached sequence continues from `previous`,
    the sum at the last cached token of the row, [B, G], or of each token's sequence, [B, G, N].
    A row that is split over processes is summed over all of them.
    """
    wide = increments.to(torch.promote_types(increments.dtype, torch.float32))
    if positions.valid is not None:
        wide = wide * positions.valid[:, None]
    if positions.shards is not None:
        return positions.shards.running_sum(wide)
    total = cumulative_sum(wide)
    if positions.segments is not None:
        runs = positions.segments
        index = torch.arange(runs.shape[-1], device=runs.device)
        first = torch.where(run_starts(runs), index, 0).cummax(-1).values[:, None].expand_as(total)
        total = total - (total - wide).gather(-1, first)
    if previous is None:
        return total
    return total + (previous if previous.dim() == 3 else previous[..., None])


def leading_parts(numbers: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The first two parts of float32 numbers that a half-precision dtype holds exactly; for wider dtypes, all and zero.

    Low bits are masked. A cast to `dtype` and back would round too, but compilers leave such pairs of casts out.
    """
    mask = LOW_BITS.get(dtype)
    if mask is None:
        return numbers, torch.zeros_like(numbers)
    first = (numbers.view(torch.int32) & mask).view(torch.float32)
    return first, ((numbers - first).view(torch.int32) & mask).view(torch.float32)


def split_parts(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """[...] -> [..., 3] in `dtype`; the parts add up to the numbers. The full gradient goes through the last part."""
    wide = numbers.to(torch.promote_types(numbers.dtype, torch.float32)) / COLUMN_UNIT
    exact = wide.detach()
    first, second = leading_parts(exact.float() if dtype in LOW_BITS else exact, dtype)
    return torch.stack([part.to(dtype) for part in (first, second, wide - first - second)], dim=-1)


def join_parts(columns: Tensor) -> Tensor:
    """[..., 3] -> [...] in float32 or wider: the inverse of `split_parts`."""
    return columns.to(torch.promote_types(columns.dtype, torch.float32)).sum(-1) * COLUMN_UNIT
