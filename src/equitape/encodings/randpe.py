"""RandPE: RoPE with random ids from a longer range in training (docs/reference/encodings/randpe.md)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..settings import Positive
from .base import LayerEncoding, PositionalEncoding, register_encoding
from .columns import RotaryLayer
from .frequencies import UNSCALED, Base, check_rotary, inverse_frequencies
from .options import Geometry, Options
from .phasors import phasors
from .positions import Positions
from .values import RotaryOptions


@dataclass(frozen=True, kw_only=True)
class RandPEOptions(Options):
    """Options of RandPE."""

    theta: Base = 10000.0
    range: Positive | None = None
    """Ids are drawn from 0 .. range - 1. Default: the model's max_position_embeddings."""
    sample_in_eval: bool = False
    """Also draw ids in evaluation; outputs are then random and a cache is not supported."""

    def check(self, geometry: Geometry) -> None:
        check_rotary("randpe", UNSCALED, geometry)


@register_encoding("randpe")
class RandPE(PositionalEncoding):
    """In training, N tokens get N sorted ids drawn without replacement; in evaluation, ids are unchanged."""

    bounded_ids = True
    idea = "RoPE over sorted random ids while training"
    options_class = RandPEOptions
    options: RandPEOptions
    needs_even_head_dim = True
    has_field = True

    @property
    def cache_refusal(self) -> str | None:
        if not self._samples:
            return None
        return "new ids are drawn at every call, so cached keys would have other positions; call eval() first"

    @property
    def _samples(self) -> bool:
        return self.training or self.options.sample_in_eval

    @property
    def _range(self) -> int:
        return self.options.range or self.geometry.max_positions

    def check_lengths(self, trained: int, tested: int) -> None:
        needed = max(trained, tested) if self.options.sample_in_eval else trained
        if self._range < needed:
            raise ValueError(
                f"it draws ids from a range of {self._range}, too small for {needed} tokens; set range to "
                f"{needed} or more"
            )

    def map_ids(self, positions: Positions, embeddings: Tensor, last_key: Tensor | None) -> Positions:
        if not self._samples:
            return positions
        num_tokens, reach = positions.ids.shape[1], self._range
        if num_tokens > reach:
            raise ValueError(
                f"Encoding 'randpe' draws ids from a range of {reach}, but the input has {num_tokens} tokens; "
                f"raise the option range to at least {num_tokens}."
            )
        draw = torch.rand(embeddings.shape[0], reach, device=positions.ids.device).argsort(-1)[:, :num_tokens]
        return positions._replace(ids=draw.sort(-1).values)

    def initial_state(self, positions: Positions, dtype: torch.dtype) -> Tensor:
        frequencies = inverse_frequencies(self.geometry.head_dim, self.options.theta, UNSCALED, positions.ids.device)
        return phasors(positions.ids, frequencies, dtype)

    def layer(self, index: int) -> LayerEncoding:
        return RotaryLayer(RotaryOptions(), self.geometry)
