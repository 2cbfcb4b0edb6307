"""Sinusoidal absolute positions added to the embeddings (docs/reference/encodings/sinusoidal.md)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .base import PositionalEncoding, register_encoding
from .frequencies import Base, position_dtype
from .options import Geometry, Options
from .positions import Positions


@dataclass(frozen=True, kw_only=True)
class SinusoidalOptions(Options):
    """Options of sinusoidal positions."""

    theta: Base = 10000.0
    amplitude: float = 0.02
    """Amplitude of the waves: that of initial embeddings. The original scales embeddings up to the waves instead."""

    def check(self, geometry: Geometry) -> None:
        if geometry.hidden_size % 2:
            raise ValueError(f"Encoding 'sinusoidal' needs an even hidden_size, not {geometry.hidden_size}.")


@register_encoding("sinusoidal")
class Sinusoidal(PositionalEncoding):
    """x_i + a [sin(p w_0), cos(p w_0), sin(p w_1), ...], w_k = theta^(-2k/C)."""

    idea = "fixed sinusoids added to the embedding"
    options_class = SinusoidalOptions
    options: SinusoidalOptions
    shift_invariant = False

    def embed(self, x: Tensor, positions: Positions) -> Tensor:
        size = self.geometry.hidden_size
        dtype = position_dtype(x.device)
        exponent = torch.arange(0, size, 2, device=x.device, dtype=dtype) / size
        angles = positions.ids[..., None].to(dtype) * self.options.theta**-exponent
        waves = torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)
        return x + (self.options.amplitude * waves).to(x.dtype)
