"""A clock: content advances positions. A token counts for 0 to K steps; 1 is the usual one.

p_i = id_i + sum over j <= i of r tanh(u_j / r), with u = s w_g x / 2, r = K - 1 for u > 0 and 1 otherwise, x the
normalised embeddings, w of key-value head g and s the clock's speed. At w = 0, where training starts, positions are the
ids. The sum is called the drift of the clock.

Shapes: B batch, N tokens, G key-value heads, C hidden size, E extra columns.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from ..settings import Gt
from .decay import DecayOptions
from .positions import Positions
from .running import PARTS, join_parts, running_sum, without_autocast

EPSILON = 1e-6


@dataclass(frozen=True, kw_only=True)
class ClockOptions(DecayOptions):
    """Options of rotary encodings with an optional decay and clock."""

    clock: bool = False
    """Whether content advances positions: each token counts for its own number of steps, learned per key-value head."""
    clock_speed: Annotated[float, Gt(0)] = 1.0
    """Learning speed of the clock relative to other weights. With a higher speed tokens come to count for the least or
    the most steps sooner."""
    clock_most: Annotated[float, Gt(1)] = 2.0
    """K: the most steps that a token may count for. With pi it then turns the fastest phasor by half a turn, so that
    positions can tell odd counts from even ones."""


def clock_drift(
    weight: Tensor, embeddings: Tensor, positions: Positions, previous: Tensor | None, options: ClockOptions
) -> Tensor:
    """[B, G, N] in float32 or wider.

    weight: [G, C]; embeddings: [B, N, C]; previous: [B, G, E], the columns of the last cached key of the first block;
    the clock's come last.
    """
    wide = torch.promote_types(embeddings.dtype, torch.float32)
    with without_autocast(embeddings.device):
        x = embeddings.to(wide)
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON)
        ahead, rise = nn.functional.linear(x, weight.to(wide)) * (options.clock_speed / 2), options.clock_most - 1
        steps = torch.where(ahead > 0, rise * (ahead / rise).tanh(), ahead.tanh())
    before = None if previous is None else join_parts(previous[..., -PARTS:])
    return running_sum(steps.transpose(1, 2), positions, before)


def clock_positions(positions: Positions, dtype: torch.dtype) -> Tensor:
    """Ids [B, N], or [B, G, N] in `dtype` if a clock has moved them."""
    if positions.drift is None:
        return positions.ids
    return positions.ids[:, None].to(dtype) + positions.drift.to(dtype)
