"""The state of a field of which only some frequencies change: the phasors that all start with, and those that change.

The first have one head if all heads start alike, so blocks neither copy nor read them for every head.

Shapes: B batch, N tokens, G key-value heads, S heads that start differently (1 or G), D head dimension, F frequencies
that change.
"""

import torch
from torch import Tensor


def pack(start: Tensor, changed: Tensor) -> Tensor:
    """[B or 1, S, N, D] and [B, G, N, 2 F] as one state: [B, 1, N, S D + 2 G F]."""
    start = start.expand(changed.shape[0], -1, -1, -1).to(changed.dtype)
    return torch.cat([part.transpose(1, 2).flatten(2)[:, None] for part in (start, changed)], dim=-1)


def unpack(state: Tensor, groups: int, head_dim: int, count: int) -> tuple[Tensor, Tensor]:
    """What `pack` packed, as views.

    Not by torch.split: the compiler writes the gradient of its input to memory, and adds up those of slices in place.
    """
    middle = state.shape[-1] - 2 * count * groups
    start, changed = state[:, 0, :, :middle], state[:, 0, :, middle:]
    return start.unflatten(-1, (-1, head_dim)).transpose(1, 2), changed.unflatten(-1, (groups, -1)).transpose(1, 2)
