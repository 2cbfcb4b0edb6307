"""Learned absolute positions added to the embeddings (docs/reference/encodings/learned.md)."""

from dataclasses import dataclass

from torch import Tensor, nn

from ..settings import Positive
from .base import PositionalEncoding, register_encoding
from .options import Geometry, Options
from .positions import Positions, may_read


@dataclass(frozen=True, kw_only=True)
class LearnedOptions(Options):
    """Options of the learned table."""

    num_positions: Positive | None = None
    """Rows of the table. Default: the model's max_position_embeddings."""


@register_encoding("learned")
class Learned(PositionalEncoding):
    """x_i + P[p_i] with a trained table P."""

    bounded_ids = True
    idea = "a trained vector per id, added to the embedding"
    options_class = LearnedOptions
    options: LearnedOptions
    shift_invariant = False

    def __init__(self, options: LearnedOptions, geometry: Geometry):
        super().__init__(options, geometry)
        self.table = nn.Embedding(options.num_positions or geometry.max_positions, geometry.hidden_size)

    def check_lengths(self, trained: int, tested: int) -> None:
        rows, needed = self.table.num_embeddings, max(trained, tested)
        if rows < needed:
            raise ValueError(
                f"its learned table of {rows} positions is too short for {needed} tokens; set num_positions to "
                f"{needed} or more"
            )

    def embed(self, x: Tensor, positions: Positions) -> Tensor:
        rows = self.table.num_embeddings
        if may_read():
            largest = int(positions.ids.max())
            if largest >= rows:
                raise ValueError(
                    f"Position id {largest} is beyond the learned table of {rows} rows (ids 0 to {rows - 1}); "
                    f"use shorter input or a model with a larger num_positions."
                )
        return x + self.table(positions.ids)
