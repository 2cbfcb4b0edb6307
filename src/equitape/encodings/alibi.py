"""ALiBi: a penalty linear in distance, one slope a head (docs/reference/encodings/alibi.md)."""

import math

import torch
from torch import Tensor

from .base import LayerEncoding, PositionalEncoding, ScoreMod, register_encoding
from .positions import Positions


def slopes(num_heads: int, device: torch.device) -> Tensor:
    """[H]: 2^(-8 h / H) for H a power of two; else those of the power below, then every other one of that above."""
    below = 2 ** math.floor(math.log2(num_heads))
    head = torch.arange(num_heads, device=device, dtype=torch.float32)
    # multiples of 2^-k all of them, so float32 holds the exponents exactly
    exponent = torch.where(head < below, (head + 1) / below, (2 * (head - below) + 1) / (2 * below))
    return torch.exp2(-8 * exponent)


class ALiBiLayer(LayerEncoding):
    """score_ij - slope_h (p_i - p_j)."""

    def bias(
        self, query: Tensor, key: Tensor, state: Tensor | None, positions: Positions, key_ids: Tensor,
        visible: Tensor, scale: float,
    ) -> Tensor:  # fmt: skip
        assert state is not None
        distance = positions.ids[:, None, :, None] - key_ids[:, None, None, :]
        return -state[:, None, None] * distance

    def score_mod(self, state: Tensor | None, positions: Positions, key_ids: Tensor) -> ScoreMod:
        assert state is not None
        rows = key_ids.shape[0]
        query_ids = positions.ids.expand(rows, -1)

        def add_bias(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            row = batch if rows > 1 else torch.zeros_like(batch)
            return score - state[head] * (query_ids[row, query] - key_ids[row, key])

        return add_bias


@register_encoding("alibi")
class ALiBi(PositionalEncoding):
    """The state is the slopes [H], in float32 so that long distances keep their digits."""

    idea = "a penalty linear in distance, a fixed slope for each head"
    adds_bias = True

    def initial_state(self, positions: Positions, dtype: torch.dtype) -> Tensor:
        return slopes(self.geometry.num_heads, positions.ids.device)

    def layer(self, index: int) -> LayerEncoding:
        return ALiBiLayer()
