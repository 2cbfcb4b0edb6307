"""RoPE: queries and keys rotated by the angle of their position; all scalings (docs/reference/encodings/rope.md)."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .base import LayerEncoding, PositionalEncoding, register_encoding
from .frequencies import Scaling, check_rotary, inverse_frequencies, softmax_scale
from .options import Geometry, Options
from .phasors import multiply, phasors
from .positions import Positions


@dataclass(frozen=True, kw_only=True)
class RoPEOptions(Options):
    """Options of RoPE."""

    theta: float = 10000.0
    scaling: Scaling = field(default_factory=Scaling)

    def check(self, geometry: Geometry) -> None:
        check_rotary("rope", self.theta, self.scaling, geometry.head_dim)


class RoPELayer(LayerEncoding):
    """q~ = z q, k~ = z k, channels (m, m + M) read as a complex number."""

    def rotate(self, query: Tensor, key: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        assert state is not None
        return multiply(query, state), multiply(key, state)


@register_encoding("rope")
class RoPE(PositionalEncoding):
    """z = exp(i theta_m p), the same for all heads and layers."""

    idea = "queries and keys turned by an angle proportional to the id"
    options_class = RoPEOptions
    options: RoPEOptions
    needs_even_head_dim = True
    has_field = True

    def __init__(self, options: RoPEOptions, geometry: Geometry):
        super().__init__(options, geometry)
        # an instance attribute, since only dynamic NTK looks at the length of the sequence
        self.needs_extent = options.scaling.kind == "dynamic"

    @property
    def cache_refusal(self) -> str | None:
        if self.options.scaling.kind != "dynamic":
            return None
        return (
            "dynamic NTK changes its frequencies with the length of the sequence, so keys cached earlier would have "
            "been turned by other angles; use the scaling 'ntk' with a fixed factor"
        )

    @property
    def causal(self) -> bool:
        return self.options.scaling.kind != "dynamic"

    @property
    def score_scale(self) -> float:
        return softmax_scale(self.options.scaling)

    def initial_state(self, positions: Positions, dtype: torch.dtype) -> Tensor:
        frequencies = inverse_frequencies(
            self.geometry.head_dim, self.options.theta, self.options.scaling, positions.ids.device, positions.span
        )
        return phasors(positions.ids, frequencies, dtype)

    def layer(self, index: int) -> LayerEncoding:
        return RoPELayer()
