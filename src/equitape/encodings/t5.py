"""T5's relative bias: a learned number per head and distance bucket (docs/reference/encodings/t5.md)."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .base import LayerEncoding, PositionalEncoding, ScoreMod, register_encoding
from .options import Geometry, Options
from .positions import Positions


@dataclass(frozen=True, kw_only=True)
class T5Options(Options):
    """Options of the T5 bias."""

    num_buckets: int = 32
    max_distance: int = 128

    def __post_init__(self) -> None:
        if self.num_buckets < 2 or self.max_distance <= self.num_buckets // 2:
            raise ValueError(
                f"Encoding 't5' needs num_buckets of 2 or more and max_distance above num_buckets / 2; they are "
                f"{self.num_buckets} and {self.max_distance}."
            )


def bucket(distance: Tensor, num_buckets: int, max_distance: int) -> Tensor:
    """Bucket of a distance p_i - p_j: one each for the first half, then logarithmic, the last for all larger ones."""
    distance = distance.clamp(min=0)
    exact = num_buckets // 2
    growth = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    beyond = exact + (growth * (num_buckets - exact)).long()
    return torch.where(distance < exact, distance, beyond.clamp(max=num_buckets - 1))


class T5Layer(LayerEncoding):
    """score_ij + table[bucket(p_i - p_j), h]."""

    def __init__(self, options: T5Options):
        super().__init__()
        self.options = options

    def bias(
        self, query: Tensor, key: Tensor, state: Tensor | None, positions: Positions, key_ids: Tensor,
        visible: Tensor, scale: float,
    ) -> Tensor:  # fmt: skip
        assert state is not None
        distance = positions.ids[:, :, None] - key_ids[:, None, :]
        # keys last in memory: `LayerEncoding.bias` says why
        return state.mT[:, bucket(distance, self.options.num_buckets, self.options.max_distance)].transpose(0, 1)

    def score_mod(self, state: Tensor | None, positions: Positions, key_ids: Tensor) -> ScoreMod:
        assert state is not None
        rows = key_ids.shape[0]
        query_ids = positions.ids.expand(rows, -1)
        num_buckets, max_distance = self.options.num_buckets, self.options.max_distance

        def add_bias(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            row = batch if rows > 1 else torch.zeros_like(batch)
            distance = query_ids[row, query] - key_ids[row, key]
            return score + state[bucket(distance, num_buckets, max_distance), head]

        return add_bias


@register_encoding("t5")
class T5(PositionalEncoding):
    """One table [buckets, H] for all layers, as in T5; it is passed on as the state, so that every layer trains it."""

    idea = "a learned number per head and distance bucket"
    options_class = T5Options
    options: T5Options
    adds_bias = True
    needs_causal = True

    def __init__(self, options: T5Options, geometry: Geometry):
        super().__init__(options, geometry)
        self.table = nn.Parameter(torch.empty(options.num_buckets, geometry.num_heads))

    def reset_parameters(self, std: float) -> None:
        nn.init.normal_(self.table, std=std)

    def initial_state(self, positions: Positions, dtype: torch.dtype) -> Tensor:
        return self.table

    def layer(self, index: int) -> LayerEncoding:
        return T5Layer(self.options)
