"""Fields of phasors, complex numbers held half-split in real tensors: made, multiplied, and turned by one another.

Shapes: B batch, N tokens, H heads, G key-value heads, D head dimension, M = D / 2 frequencies.
"""

from typing import Any

import torch
from torch import Tensor


def phasors(ids: Tensor, frequencies: Tensor, dtype: torch.dtype) -> Tensor:
    """exp(i theta_m p) as [cos | sin]. ids [B, N], frequencies [M] or [B, N, M] -> [B, 1, N, D] in `dtype`."""
    if torch.compiler.is_compiling() and ids.shape[-1] > 1:
        return _opaque_phasors(ids, frequencies, dtype)
    angles = ids[..., None].to(frequencies.dtype) * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(dtype)[:, None]


@torch.library.custom_op("equitape::phasors", mutates_args=())
def _opaque_phasors(ids: Tensor, frequencies: Tensor, dtype: torch.dtype) -> Tensor:
    """The same where the compiler cannot look inside.

    It would take the cosines into the rotation of every layer and work them out again, in float64, for every head: half
    of the time of a prefill.
    """
    return phasors(ids, frequencies, dtype)


@_opaque_phasors.register_fake
def _(ids: Tensor, frequencies: Tensor, dtype: torch.dtype) -> Tensor:
    return ids.new_empty((*ids.shape, 2 * frequencies.shape[-1]), dtype=dtype)[:, None]


def multiply(x: Tensor, phasor: Tensor) -> Tensor:
    """Complex product of fields held half-split, real parts first: x [B, H, N, D], phasor [B, G or 1, N, D] -> like x.

    Query head h is turned by the phasor of its key-value head h // (H / G).
    """
    heads, groups = x.shape[1], phasor.shape[1]
    if groups not in (1, heads):
        phasor = phasor.repeat_interleave(heads // groups, dim=1)
    real, imaginary = phasor.chunk(2, dim=-1)
    x_real, x_imaginary = x.chunk(2, dim=-1)
    return torch.cat((x_real * real - x_imaginary * imaginary, x_real * imaginary + x_imaginary * real), dim=-1)


def turn(x: Tensor, field: Tensor) -> Tensor:
    """`multiply` by a field that is trained, keeping less for the backward pass: attention keeps the result anyway, and
    the result divided by the field is x again.
    """
    return _Turn.apply(x, field) if torch.is_grad_enabled() and field.requires_grad else multiply(x, field)


class _Turn(torch.autograd.Function):
    """y = z x, with dx = conj(z) dy and dz = conj(x) dy = conj(y / z) dy, the latter summed over heads that share z."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, field: Tensor) -> Tensor:
        turned = multiply(x, field)
        ctx.save_for_backward(turned, field)
        return turned

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        turned, field = ctx.saved_tensors
        wide = torch.promote_types(field.dtype, torch.float32)
        steep, conjugate = gradient.to(wide), _conjugate(field.to(wide))
        x_gradient = multiply(steep, conjugate)
        # sums over the heads of a group by themselves: dz = dy conj(y) / conj(z)
        product = multiply(steep, _conjugate(turned.to(wide)))
        groups = field.shape[1]
        summed = product.unflatten(1, (groups, -1)).sum(2)
        square = field.to(wide).unflatten(-1, (2, -1)).square().sum(-2).repeat(1, 1, 1, 2)
        quotient = multiply(summed, field.to(wide)) / square
        # where the field is zero, nothing of x is left to divide by it
        field_gradient = torch.where(square > 0, quotient, 0).sum_to_size(field.shape)
        return x_gradient.to(gradient.dtype), field_gradient.to(field.dtype)


def _conjugate(field: Tensor) -> Tensor:
    real, imaginary = field.chunk(2, dim=-1)
    return torch.cat((real, -imaginary), dim=-1)
