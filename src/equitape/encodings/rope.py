"""RoPE: rotate queries and keys by the angle of their position; all scalings (docs/reference/encodings/rope.md)."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .base import LayerEncoding, register_encoding
from .clock import clock_positions
from .columns import ColumnsEncoding, RotaryLayer
from .frequencies import Base, Scaling, axis_frequencies, check_rotary, softmax_scale
from .options import Geometry
from .phasors import phasors
from .positions import Positions
from .values import RotaryOptions


@dataclass(frozen=True, kw_only=True)
class RoPEOptions(RotaryOptions):
    """Options of RoPE."""

    theta: Base = 10000.0
    scaling: Scaling = field(default_factory=Scaling)

    def check(self, geometry: Geometry) -> None:
        check_rotary("rope", self.scaling, geometry)
        self.check_decay("rope", geometry)
        self.check_values("rope", geometry)


@register_encoding("rope")
class RoPE(ColumnsEncoding):
    """z = exp(i theta_m p), shared by all heads and layers."""

    idea = "queries and keys rotated by an angle proportional to the id"
    options_class = RoPEOptions
    options: RoPEOptions
    needs_even_head_dim = True
    takes_axes = True
    has_field = True

    def __init__(self, options: RoPEOptions, geometry: Geometry):
        super().__init__(options, geometry, options)
        # dynamic NTK depends on the sequence length
        self.needs_extent = self.needs_extent or options.scaling.kind == "dynamic"

    @property
    def cache_refusal(self) -> str | None:
        if self.options.scaling.kind != "dynamic":
            return None
        return (
            "dynamic NTK changes its frequencies with the sequence length, so cached keys would have been rotated by "
            "other angles; use the scaling 'ntk' with a fixed factor"
        )

    @property
    def causal(self) -> bool:
        return self.options.scaling.kind != "dynamic"

    @property
    def score_scale(self) -> float:
        return softmax_scale(self.options.scaling)

    def initial_state(self, positions: Positions, dtype: torch.dtype) -> Tensor:
        frequencies = axis_frequencies(
            self.geometry, self.options.theta, self.options.scaling, positions.ids.device, positions.span
        )
        return phasors(clock_positions(positions, frequencies.dtype), frequencies, dtype)

    def layer(self, index: int) -> LayerEncoding:
        return RotaryLayer(self.options, self.geometry, self.keeps_clock(index))
