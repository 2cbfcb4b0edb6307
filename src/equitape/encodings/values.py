"""Rotated values: a value is rotated by the field of its token, like a key, and attention's output is rotated back by
the field of the query.

o_i = conj(z_i) sum over j of a_ij z_j v_j

The output then depends on how far away each value stood, not only on what it was. Rotating all phasors of a frequency
by the same angle changes nothing, since the second rotation undoes it. Geometric Transform Attention (arXiv 2310.10375)
rotates values in the same way.

Shapes: B batch, N tokens, H query heads, G key-value heads, D head dimension.
"""

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from ..settings import Ge, Le
from .clock import ClockOptions
from .options import Geometry
from .phasors import multiply


@dataclass(frozen=True, kw_only=True)
class RotaryOptions(ClockOptions):
    """Options of rotary encodings with an optional decay, clock and rotation of values."""

    rotate_values: Annotated[float, Ge(0), Le(1)] = 0.0
    """Fraction of key-value heads, from the first on, whose values are rotated like keys and whose outputs are rotated
    back."""

    def check_values(self, kind: str, geometry: Geometry) -> None:
        """Raise ValueError for a fraction of less than one head."""
        if self.rotate_values and not self.value_heads(geometry):
            heads = geometry.num_kv_heads
            raise ValueError(
                f"Encoding {kind!r} has rotate_values {self.rotate_values}, which selects none of {heads} key-value "
                f"heads; raise it to at least {1 / heads:.3g}, or set it to 0."
            )

    def value_heads(self, geometry: Geometry) -> int:
        """Number of key-value heads whose values are rotated."""
        return round(self.rotate_values * geometry.num_kv_heads)


def rotate_values(value: Tensor, field: Tensor, heads: int) -> Tensor:
    """The first heads of a value [B, G, N, D], rotated by the field [B or 1, G or 1, N, D], and the others."""
    return _rotate_first(value, field, heads)


def rotate_back(output: Tensor, field: Tensor, heads: int) -> Tensor:
    """Undo the rotation of the first query heads of attention's output [B, N, H, D]."""
    return _rotate_first(output.transpose(1, 2), field, heads, conjugate=True).transpose(1, 2)


def _rotate_first(x: Tensor, field: Tensor, heads: int, conjugate: bool = False) -> Tensor:
    count, groups = x.shape[1], field.shape[1]
    if heads == count:
        return _rotate(x, field, conjugate)
    own = field if groups == 1 else field[:, : heads * groups // count]
    return torch.cat((_rotate(x[:, :heads], own, conjugate), x[:, heads:]), dim=1)


def _rotate(x: Tensor, field: Tensor, conjugate: bool) -> Tensor:
    """x [B, H, N, D] times the field [B or 1, G or 1, N, D] of its head, or its conjugate."""
    if not (torch.is_grad_enabled() and field.requires_grad):
        return multiply(x, field, conjugate=conjugate)
    rotated: Tensor = _Rotate.apply(x, field.expand(x.shape[0], -1, -1, -1), conjugate)
    return rotated


class _Rotate(torch.autograd.Function):
    """A product that saves only its factors; autograd would also save the field once per query head."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, field: Tensor, conjugate: bool) -> Tensor:
        ctx.save_for_backward(x, field)
        ctx.conjugate = conjugate
        return multiply(x, field, conjugate=conjugate)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, field = ctx.saved_tensors
        # of y = z x: conj(z) dy and conj(x) dy; of y = conj(z) x: z dy and x conj(dy)
        of_x = multiply(gradient, field, conjugate=not ctx.conjugate)
        left, right = (x, gradient) if ctx.conjugate else (gradient, x)
        wide = torch.promote_types(field.dtype, torch.float32)
        of_heads = multiply(left.to(wide), right.to(wide), conjugate=True)
        of_field = of_heads.unflatten(1, (field.shape[1], -1)).sum(2)
        return of_x, of_field.to(field.dtype), None
