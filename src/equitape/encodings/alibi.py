"""ALiBi: a penalty linear in distance, one slope a head (docs/encodings/alibi.md)."""

import math

import torch
from torch import Tensor

from .base import LayerEncoding, PositionalEncoding, ScoreMod, register_encoding
from .positions import Positions


def slopes(num_heads: int) -> list[float]:
    """2^(-8 h / H) for H a power of two; otherwise those of the power below, filled up with every other one above."""

    def geometric(count: int) -> list[float]:
        return [2 ** (-8 * (head + 1) / count) for head in range(count)]

    below = 2 ** math.floor(math.log2(num_heads))
    return geometric(below) + geometric(2 * below)[0::2][: num_heads - below]


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

    def begin(self, positions: Positions, dtype: torch.dtype) -> Tensor:
        return torch.tensor(slopes(self.geometry.num_heads), device=positions.ids.device, dtype=torch.float32)

    def layer(self, index: int) -> LayerEncoding:
        return ALiBiLayer()
