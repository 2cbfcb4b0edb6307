"""Rotary frequencies and their scalings: pure functions, nothing stored.

Angles are computed in float64 (float32 on devices without it) for any model dtype: in float32, an angle near a million
radians may be off by 0.03. Nothing is a buffer, so casting a model to half precision cannot round them.

Shapes: D head dimension, M = D / 2 frequencies, A axes.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from ..settings import Ge, Gt
from .options import Geometry, Options

Base = Annotated[float, Gt(1)]
"""theta: frequency m is theta^(-m / M)."""


@dataclass(frozen=True, kw_only=True)
class Scaling(Options):
    """How rotary frequencies change for contexts longer than the trained one (docs/reference/encodings/rope.md)."""

    kind: Literal["default", "theta", "linear", "ntk", "dynamic", "yarn", "llama3"] = "default"
    """"default" leaves frequencies unchanged, "theta" replaces the base, the others follow their papers."""
    factor: Annotated[float, Ge(1)] = 1.0
    """Ratio of the new context to the trained one."""
    original_max_positions: int | None = None
    """Trained context; required by dynamic, yarn and llama3."""
    theta: Base | None = None
    """The new base, for kind "theta"."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    """YaRN's factor on queries and keys. Default: computed from `factor`."""
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self) -> None:
        if self.kind in ("dynamic", "yarn", "llama3") and self.original_max_positions is None:
            raise ValueError(f"Rotary scaling {self.kind!r} needs original_max_positions, the trained context length.")
        if self.kind == "theta" and self.theta is None:
            raise ValueError("Rotary scaling 'theta' has no theta; set the new base, above 1.")
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ValueError("Rotary scaling 'llama3' needs high_freq_factor above low_freq_factor.")


UNSCALED = Scaling()
"""Built once, outside the forward pass: torch.compile cannot trace the checks of settings."""


def check_rotary(owner: str, scaling: Scaling, geometry: Geometry) -> None:
    """Raise ValueError for a head size that lacks frequencies."""
    head_dim, axes = geometry.head_dim, geometry.num_axes
    if axes > 1 and head_dim // 2 < axes:
        raise ValueError(
            f"Encoding {owner!r} has {head_dim // 2} frequencies in head_dim {head_dim}, too few for {axes} axes; "
            f"use a head_dim of at least {2 * axes}."
        )
    if axes > 1 and scaling.kind == "dynamic":
        raise ValueError(
            f"Encoding {owner!r} with {axes} axes cannot have the scaling 'dynamic', which counts tokens along one; "
            f"use 'ntk'."
        )
    if not geometry.mixed_axes:
        # of the axis with the fewest frequencies
        head_dim = 2 * (head_dim // 2 // axes)
    if scaling.kind in ("ntk", "dynamic") and head_dim <= 2:
        raise ValueError(f"Rotary scaling {scaling.kind!r} needs head_dim above 2, not {head_dim}.")


def softmax_scale(scaling: Scaling) -> float:
    """YaRN's factor on scores.

    transformers scales cos and sin, hence queries and keys alike; the square of that factor on the softmax scale keeps
    the rotation pure.
    """
    if scaling.kind != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor**2

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(scaling.factor) + 1.0

    if scaling.mscale and scaling.mscale_all_dim:
        return (magnitude(scaling.mscale) / magnitude(scaling.mscale_all_dim)) ** 2
    return magnitude(1.0) ** 2


def position_dtype(device: torch.device) -> torch.dtype:
    """float64, or float32 on devices without it."""
    return torch.float32 if device.type in ("mps", "xla") else torch.float64


def inverse_frequencies(
    head_dim: int, theta: float, scaling: Scaling, device: torch.device, span: Tensor | None = None
) -> Tensor:
    """theta_m after scaling: [M], or [..., M] for dynamic NTK with sequence lengths `span` [...]."""
    dtype = position_dtype(device)
    exponent = torch.arange(0, head_dim, 2, device=device, dtype=dtype) / head_dim
    if scaling.kind == "theta":
        assert scaling.theta is not None
        theta = scaling.theta
    if scaling.kind == "ntk":
        theta = theta * scaling.factor ** (head_dim / (head_dim - 2))
    if scaling.kind == "dynamic":
        assert scaling.original_max_positions is not None and span is not None
        trained = scaling.original_max_positions
        stretch = scaling.factor * span.to(dtype).clamp(min=trained) / trained - (scaling.factor - 1)
        return (theta * stretch[..., None] ** (head_dim / (head_dim - 2))) ** -exponent
    # created on the device: a copy from the host would wait, and a CUDA graph could not contain it
    plain = torch.full((), theta, device=device, dtype=dtype) ** -exponent
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.kind == "yarn":
        return _yarn(plain, head_dim, theta, scaling)
    if scaling.kind == "llama3":
        return _llama3(theta, exponent, scaling)
    return plain


def axis_frequencies(
    geometry: Geometry, theta: float, scaling: Scaling, device: torch.device, span: Tensor | None = None
) -> Tensor:
    """The frequencies of a model: those of `inverse_frequencies` for one axis, vectors [A, M] for several.

    A token at p [A] has the angles p W. Axial: frequency m turns with axis m mod A, and each axis has the frequencies
    of a head of its size. Mixed: frequency m turns with a fixed direction across all axes.
    """
    dim, axes = geometry.head_dim, geometry.num_axes
    if axes == 1 or geometry.mixed_axes:
        return spread_over_axes(inverse_frequencies(dim, theta, scaling, device, span), geometry)
    sizes = [len(range(axis, dim // 2, axes)) for axis in range(axes)]
    # those of the last axis may be one fewer
    padded = [
        nn.functional.pad(inverse_frequencies(2 * size, theta, scaling, device), (0, sizes[0] - size)) for size in sizes
    ]
    return spread_over_axes(torch.stack(padded, dim=-1).flatten()[: dim // 2], geometry)


def spread_over_axes(frequencies: Tensor, geometry: Geometry) -> Tensor:
    """Frequencies [M] as vectors [A, M], axial or mixed as in `axis_frequencies`; unchanged for one axis."""
    axes, count = geometry.num_axes, frequencies.shape[-1]
    if axes == 1:
        return frequencies
    if geometry.mixed_axes:
        return frequencies * directions(count, axes, frequencies.device)
    index = torch.arange(count, device=frequencies.device)
    axis = torch.arange(axes, device=frequencies.device)
    return frequencies * (index % axes == axis[:, None])


def directions(count: int, axes: int, device: torch.device) -> Tensor:
    """Unit vectors spread evenly over all directions: [A, count].

    A low-discrepancy sequence (multiples of powers of the generalised golden ratio), mapped to a normal distribution.
    """
    ratio = 2.0
    for _ in range(64):
        ratio = (1 + ratio) ** (1 / (axes + 1))
    dtype = position_dtype(device)
    steps = torch.full((), 1 / ratio, device=device, dtype=dtype) ** torch.arange(1, axes + 1, device=device)
    uniform = (0.5 + steps[:, None] * torch.arange(1, count + 1, device=device, dtype=dtype)) % 1
    normal = torch.erfinv(2 * uniform - 1)
    return normal / normal.norm(dim=0)


def _yarn(plain: Tensor, head_dim: int, theta: float, scaling: Scaling) -> Tensor:
    """High frequencies stay, low ones are interpolated, with a linear ramp between (arXiv 2309.00071, eq. 17-23)."""
    assert scaling.original_max_positions is not None

    def dim_of(rotations: float) -> float:
        wavelength = scaling.original_max_positions / (rotations * 2 * math.pi)  # type: ignore[operator]
        return head_dim * math.log(wavelength) / (2 * math.log(theta))

    low, high = dim_of(scaling.beta_fast), dim_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    index = torch.arange(head_dim // 2, device=plain.device, dtype=plain.dtype)
    interpolated = ((index - low) / (high - low)).clamp(0, 1)
    return plain * (1 - interpolated) + plain / scaling.factor * interpolated


def _llama3(theta: float, exponent: Tensor, scaling: Scaling) -> Tensor:
    """Llama 3.1's rule: by wavelength relative to the trained context, smooth in between.

    In float32 and in the order of the released models' code: near its end the smooth step enlarges rounding tenfold.
    """
    assert scaling.original_max_positions is not None
    plain = 1.0 / torch.full((), theta, device=exponent.device) ** exponent.float()
    turns = scaling.original_max_positions / (2 * math.pi / plain)
    smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = smooth.clamp(0, 1)
    return ((1 - smooth) * plain / scaling.factor + smooth * plain).to(exponent.dtype)
