"""xPos: RoPE with products that decay with distance, low frequencies least (docs/reference/encodings/xpos.md)."""

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from ..settings import Gt
from .base import LayerEncoding, PositionalEncoding, register_encoding
from .frequencies import UNSCALED, Base, check_rotary, inverse_frequencies, position_dtype
from .options import Geometry, Options
from .phasors import multiply, phasors
from .positions import Positions

# powers of two that float32 and bfloat16 can represent, with room for the queries and keys
EXPONENT_RANGE = 100.0


@dataclass(frozen=True, kw_only=True)
class XPosOptions(Options):
    """Options of xPos."""

    theta: Base = 10000.0
    scale_base: Annotated[float, Gt(0)] = 512.0
    """Distance over which frequency m decays by its factor zeta_m."""
    gamma: Annotated[float, Gt(0)] = 0.4

    def check(self, geometry: Geometry) -> None:
        check_rotary("xpos", UNSCALED, geometry)
        steepest = -math.log2(self.gamma / (1 + self.gamma))
        reach = geometry.max_positions / 2 * steepest / self.scale_base
        if reach > EXPONENT_RANGE:
            needed = math.ceil(geometry.max_positions / 2 * steepest / EXPONENT_RANGE)
            raise ValueError(
                f"Encoding 'xpos' with scale_base {self.scale_base:g} overflows within {geometry.max_positions} "
                f"positions; use a scale_base of at least {needed}."
            )


class XPosLayer(LayerEncoding):
    """q~ = s z q, k~ = z k / s with s = zeta_m^(p / scale_base)."""

    def rotate(self, query: Tensor, key: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        assert state is not None
        width = query.shape[-1]
        phasor, scale = state[..., :width], state[..., width:]
        scale = torch.cat((scale, scale), dim=-1)
        return multiply(query, phasor) * scale, multiply(key, phasor) / scale


@register_encoding("xpos")
class XPos(PositionalEncoding):
    """The state is [cos | sin | s], 3/2 D wide.

    Scores depend only on differences of ids, but s alone grows without bound. It is measured from the middle of the
    model's context, counted from the start of the sequence: a fixed point, so that cached keys stay valid.
    """

    idea = "RoPE whose products decay with distance"
    options_class = XPosOptions
    options: XPosOptions
    needs_even_head_dim = True
    needs_extent = True
    needs_causal = True

    def initial_state(self, positions: Positions, dtype: torch.dtype) -> Tensor:
        options, dim = self.options, self.geometry.head_dim
        device = positions.ids.device
        frequencies = inverse_frequencies(dim, options.theta, UNSCALED, device)
        exact = position_dtype(device)
        zeta = (torch.arange(0, dim, 2, device=device, dtype=exact) / dim + options.gamma) / (1 + options.gamma)
        # decoders other than ours may not set the start of sequences; it is then 0
        origin = 0 if positions.origin is None else positions.origin
        distance = (positions.ids - origin - self.geometry.max_positions // 2)[..., None].to(exact)
        scale = zeta ** (distance / options.scale_base)
        rotation, scale = phasors(positions.ids, frequencies, dtype), scale.to(dtype)[:, None]
        # packed rows may share their ids, but not where their sequences start
        batch = max(len(rotation), len(scale))
        return torch.cat((rotation.expand(batch, -1, -1, -1), scale.expand(batch, -1, -1, -1)), dim=-1)

    def layer(self, index: int) -> LayerEncoding:
        return XPosLayer()
