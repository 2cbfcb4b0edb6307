"""Fields of phasors, complex numbers stored half-split in real tensors: make, multiply and rotate by them.

Shapes: B batch, N tokens, H heads, G key-value heads, D head dimension, M = D / 2 frequencies, A axes.
"""

from typing import Any

import torch
from torch import Tensor

from ..kernels import apply_rotary_backward, fused_rotary, fuses_rotary, put_frequencies
from .heads import Columns, join_halves, query_heads, take_columns


def phasors(ids: Tensor, frequencies: Tensor, dtype: torch.dtype) -> Tensor:
    """exp(i theta_m p) as [cos | sin]: [B, G or 1, N, D] in `dtype`.

    ids: [B, N], or [B, G, N] if positions differ by head; frequencies: [M], or [B, N, M]. With several axes, ids are
    [B, N, A] and frequencies [A, M].
    """
    trained = torch.is_grad_enabled() and ids.requires_grad
    if trained or (torch.compiler.is_compiling() and ids.shape[-1] > 1):
        return _opaque_phasors(ids, frequencies, dtype)
    return _phasors(ids, frequencies, dtype)


def _phasors(ids: Tensor, frequencies: Tensor, dtype: torch.dtype) -> Tensor:
    if frequencies.dim() == 2:
        angles = angles_on_axes(ids, frequencies)[:, None]
    else:
        per_head = ids if ids.dim() == 3 else ids[:, None]
        angles = per_head[..., None].to(frequencies.dtype) * _per_head(frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(dtype)


def angles_on_axes(ids: Tensor, frequencies: Tensor) -> Tensor:
    """ids [B, N, A] times frequencies [A, M]: [B, N, M]. Not a matrix product, which may round to TF32."""
    return (ids[..., None].to(frequencies.dtype) * frequencies).sum(-2)


def _per_head(frequencies: Tensor) -> Tensor:
    return frequencies if frequencies.dim() == 1 else frequencies[:, None]


@torch.library.custom_op("equitape::phasors", mutates_args=())
def _opaque_phasors(ids: Tensor, frequencies: Tensor, dtype: torch.dtype) -> Tensor:
    """`_phasors` as an opaque operator for the compiler.

    Otherwise the compiler would fuse the cosines into the rotation of every layer and recompute them in float64 for
    every head: half the time of a prefill. For trained positions, it saves only the phasors for backward.
    """
    return _phasors(ids, frequencies, dtype)


@_opaque_phasors.register_fake
def _(ids: Tensor, frequencies: Tensor, dtype: torch.dtype) -> Tensor:
    per_head = ids.dim() == 3 and frequencies.dim() != 2
    shape = ids.shape if per_head else (ids.shape[0], 1, ids.shape[1])
    return ids.new_empty((*shape, 2 * frequencies.shape[-1]), dtype=dtype)


def _save_phasors(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ids, frequencies, _ = inputs
    ctx.save_for_backward(frequencies, output)
    ctx.ids_dtype = ids.dtype


def _phasors_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:
    if not ctx.needs_input_grad[0]:
        return None, None, None
    frequencies, field = ctx.saved_tensors
    wide = torch.promote_types(field.dtype, torch.float32)
    (cos, sin), (of_cos, of_sin) = field.to(wide).chunk(2, dim=-1), gradient.to(wide).chunk(2, dim=-1)
    turn = cos * of_sin - sin * of_cos
    if frequencies.dim() == 2:
        return (turn.sum(1) @ frequencies.T.to(wide)).to(ctx.ids_dtype), None, None
    turn = turn * _per_head(frequencies).to(wide)
    return turn.sum(-1).to(ctx.ids_dtype), None, None


_opaque_phasors.register_autograd(_phasors_backward, setup_context=_save_phasors)


def multiply(
    x: Tensor, phasor: Tensor, columns: Tensor | None = None, inside: int | None = None, conjugate: bool = False
) -> Tensor:
    """Complex product of half-split fields, real parts first: x [B, H, N, D], phasor [B, G or 1, N, D] -> like x.

    Query head h is rotated by the phasor of its key-value head h // (H / G). Columns are put into the product as
    `join_halves` does. conjugate: multiply by the conjugate, which rotates back.
    """
    heads, groups = x.shape[1], phasor.shape[1]
    if groups not in (1, heads):
        phasor = phasor.repeat_interleave(heads // groups, dim=1)
    real, imaginary = phasor.chunk(2, dim=-1)
    if conjugate:
        imaginary = -imaginary
    x_real, x_imaginary = x.chunk(2, dim=-1)
    product = join_halves(
        x_real * real - x_imaginary * imaginary, x_real * imaginary + x_imaginary * real, columns, inside
    )
    # under autocast, the phasor may be the wider one; attention would round the product and keep both. Avoid a cast
    # that changes nothing: compiled by torch 2.11, it stops all gradients through an autograd function
    return product if product.dtype == x.dtype else product.to(x.dtype)


def apply_rotary(
    query: Tensor, key: Tensor, field: Tensor, columns: Columns | None = None, changed: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Queries [B, H, N, D] and keys [B, G, N, D] times the field [B or 1, G or 1, N, D] of their head, with columns.

    changed: [B or 1, G, N, 2 F], numbers in place of every (D / 2 F)-th frequency of the field.
    For a trained field, this saves less for backward than `multiply`: attention keeps the rotated queries and keys
    anyway, and dividing them by the field recovers the originals.
    """
    of_query, of_key, inside = (None, None, None) if columns is None else columns
    trained = torch.is_grad_enabled() and _require_gradients(field, changed)
    if not trained and not (torch.is_grad_enabled() and _require_gradients(query, key, of_query, of_key)):
        return _rotate(query, key, field, changed, columns)
    if changed is not None and (field.requires_grad or not trained):
        field, changed = put_frequencies(field, changed), None
    if not trained:
        of_heads = query_heads(inside, query, key)
        return multiply(query, field, of_query, of_heads), multiply(key, field, of_key, inside)
    # autograd sums the gradients of what the batch, heads or tokens share
    if of_query is not None and of_key is not None:
        of_query, of_key = of_query.expand(*query.shape[:3], -1), of_key.expand(*key.shape[:3], -1)
    batch = query.shape[0]
    if changed is None:
        field = field.expand(batch, -1, -1, -1)
    else:
        changed = changed.expand(batch, -1, -1, -1)
    return _ApplyRotary.apply(query, key, field, changed, of_query, of_key, inside)


def _require_gradients(*tensors: Tensor | None) -> bool:
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _rotate(
    query: Tensor, key: Tensor, field: Tensor, changed: Tensor | None, columns: Columns | None
) -> tuple[Tensor, Tensor]:
    """`apply_rotary` without gradients."""
    of_query, of_key, inside = (None, None, None) if columns is None else columns
    if fuses_rotary(query, key, field, changed, of_query):
        rotated: tuple[Tensor, Tensor] = fused_rotary(query, key, field, changed, of_query, of_key, inside)
        return rotated
    whole = field if changed is None else put_frequencies(field, changed)
    of_heads = query_heads(inside, query, key)
    return multiply(query, whole, of_query, of_heads), multiply(key, whole, of_key, inside)


def _gradient_of_columns(gradient: Tensor, count: int, inside: int | None) -> Tensor:
    """That of columns [B, H, N, E], from that of heads with them."""
    found = take_columns(gradient, count, inside is not None)
    if inside is None or inside == gradient.shape[1]:
        return found
    has_columns = torch.arange(gradient.shape[1], device=gradient.device)[:, None, None] < inside
    return torch.where(has_columns, found, 0)


class _ApplyRotary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        field: Tensor,
        changed: Tensor | None,
        of_query: Tensor | None,
        of_key: Tensor | None,
        inside: int | None,
    ) -> tuple[Tensor, Tensor]:
        columns = None if of_query is None or of_key is None else Columns(of_query, of_key, inside)
        query, key = _rotate(query, key, field, changed, columns)
        ctx.save_for_backward(query, key, field, changed)
        ctx.columns, ctx.inside = 0 if of_query is None else of_query.shape[-1], inside
        return query, key

    @staticmethod
    def backward(ctx: Any, grad_query: Tensor, grad_key: Tensor) -> tuple[Tensor | None, ...]:
        query, key, field, changed = ctx.saved_tensors
        inside = ctx.inside
        of_columns = [
            _gradient_of_columns(gradient, ctx.columns, heads) if wanted else None
            for gradient, heads, wanted in zip(
                (grad_query, grad_key),
                (query_heads(inside, query, key), inside),
                ctx.needs_input_grad[4:6],
                strict=True,
            )
        ]
        width = field.shape[-1]
        grad_query, grad_key, query, key = (x[..., :width] for x in (grad_query, grad_key, query, key))
        replaced = 0 if inside is None else ctx.columns // 2
        gradients = apply_rotary_backward(grad_query, grad_key, query, key, field, replaced, changed, inside)
        of_field = (gradients[2], None) if changed is None else (None, gradients[2])
        return *gradients[:2], *of_field, *of_columns, None
