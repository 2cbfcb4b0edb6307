"""TAPE's operations in plain PyTorch: the definitions that fused kernels are tested against.

Shapes: B batch, N tokens, H query heads, G key-value heads, D head dimension, I mixer size. Fields are complex numbers
stored half-split, real parts first. Complex weights have a leading axis of two: real part, imaginary part.
"""

import torch
from torch import Tensor

EPSILON = 1e-8


def move_field(field: Tensor, attended: Tensor, source: Tensor, target: Tensor) -> Tensor:
    """z + z conj(a) b, with a = source c and b = target c: [B, G, N, D].

    A token moves by the distance between what the heads of a and of b attend to.
    field: [B or 1, G, N, D]; attended: c [B, H, N, D]; source, target: [G, H].
    """
    rows = _rows(attended, 1)
    a, b = (_mix(weight.to(attended.dtype), rows).transpose(1, 2) for weight in (source, target))
    return field + _complex_product(field, _complex_product(_conjugate(a), b))


def update_field(
    field: Tensor,
    attended: Tensor | None,
    gate: Tensor | None,
    carry: Tensor | None,
    mix_in: Tensor | None,
    mix_out: Tensor | None,
    normalize: bool = False,
) -> Tensor:
    """z' = z + W_a c, then z'' = z' + W_2 diag(psi) W_1 z' with psi = silu(gate), then z'' / rms(z'') if normalize.

    field: [B or 1, G, N, D]; attended: [B, H, N, D] with carry [G, H], or both None; gate: [B, N, I] with mix_in [I, G]
    and mix_out [G, I], or all None. Returns [B, G, N, D].
    """
    weight = carry if mix_in is None else mix_in
    if weight is not None:
        parts = 2 if weight.dim() == 3 else 1
        rows = _rows(field, parts)
        if attended is not None and carry is not None:
            rows = rows + _mix(_matrices_of_rows(carry, 2), _rows(attended, parts))
        if gate is not None and mix_in is not None and mix_out is not None:
            factors = _matrices_of_rows(rank_one_factors(mix_in, mix_out), 3)
            rows = rows + _weigh(torch.nn.functional.silu(gate), factors) @ rows
        field = rows.unflatten(2, (-1, parts)).flatten(3).transpose(1, 2)
    if normalize:
        # |z|^2 averaged over the D / 2 frequencies
        wide = field.to(torch.promote_types(field.dtype, torch.float32))
        square = 2 * wide.square().mean(-1, keepdim=True)
        field = field * torch.rsqrt(square + EPSILON).to(field.dtype)
    return field


def take_frequencies(field: Tensor, count: int) -> Tensor:
    """The first of every M / count frequencies: [..., 2 M] -> [..., 2 count]."""
    return field.unflatten(-1, (2, count, -1))[..., 0].flatten(-2)


def put_frequencies(field: Tensor, changed: Tensor) -> Tensor:
    """The field [..., 2 M] with other numbers [..., 2 count] where `take_frequencies` takes them."""
    changed = changed.unflatten(-1, (2, -1))[..., None]
    rest = field.unflatten(-1, (2, changed.shape[-2], -1))
    first = torch.arange(rest.shape[-1], device=field.device) == 0
    # not torch.cat: compilers write its result to memory, and compute this where it is used
    return torch.where(first, changed, rest.to(changed.dtype)).flatten(-3)


def apply_rotary_backward(
    grad_query: Tensor,
    grad_key: Tensor,
    query: Tensor,
    key: Tensor,
    field: Tensor,
    replaced: int = 0,
    changed: Tensor | None = None,
    inside: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries x, keys x and field z through y = z x, from the gradients dy and the rotated y.

    dx = conj(z) dy; dz = conj(x) dy = z / |z|^2 conj(y) dy, summed over all heads that share z. Queries [B, H, N, D],
    keys and field [B, G, N, D]. replaced: number of lowest frequencies without a gradient dy. changed: those of
    `put_frequencies`, which get a gradient instead of the field. inside: number of key-value heads, from the first on,
    where frequencies are replaced; None for all.
    """
    if changed is not None:
        whole = put_frequencies(field, changed)
        of_query, of_key, of_whole = apply_rotary_backward(
            grad_query, grad_key, query, key, whole, replaced, None, inside
        )
        return of_query, of_key, take_frequencies(of_whole, changed.shape[-1] // 2)
    wide = torch.promote_types(field.dtype, torch.float32)
    groups = field.shape[1]
    z = field.to(wide)[:, :, None]
    total = torch.zeros_like(field, dtype=wide)
    gradients = []
    for gradient, rotated in ((grad_query, query), (grad_key, key)):
        if replaced:
            halves = [half[..., : half.shape[-1] - replaced] for half in gradient.chunk(2, dim=-1)]
            zeroed = torch.cat([torch.nn.functional.pad(half, (0, replaced)) for half in halves], dim=-1)
            # the field may be shared by all heads, so heads are counted by the keys
            first = gradient.shape[1] if inside is None else inside * (gradient.shape[1] // key.shape[1])
            all_heads = first == gradient.shape[1]
            gradient = zeroed if all_heads else torch.cat((zeroed[:, :first], gradient[:, first:]), dim=1)
        # heads as [groups, heads of a group]
        g, y = (each.to(wide).unflatten(1, (groups, -1)) for each in (gradient, rotated))
        gradients.append(_complex_product(_conjugate(z), g).flatten(1, 2).to(rotated.dtype))
        total = total + _complex_product(_conjugate(y), g).sum(2)
    real, imaginary = field.to(wide).chunk(2, dim=-1)
    square = (real.square() + imaginary.square()).repeat(1, 1, 1, 2)
    # where the field is zero, y contains nothing of x
    of_field = torch.where(square > 0, _complex_product(field.to(wide), total) / square, 0)
    return gradients[0], gradients[1], of_field.to(field.dtype)


def _complex_product(left: Tensor, right: Tensor) -> Tensor:
    (a, b), (c, d) = left.chunk(2, dim=-1), right.chunk(2, dim=-1)
    return torch.cat((a * c - b * d, a * d + b * c), dim=-1)


def _conjugate(field: Tensor) -> Tensor:
    real, imaginary = field.chunk(2, dim=-1)
    return torch.cat((real, -imaginary), dim=-1)


def mixing_matrices(psi: Tensor, mix_in: Tensor, mix_out: Tensor) -> Tensor:
    """T = W_2 diag(psi) W_1 of every token: [B, N, G, G], or [B, N, 2, G, G] for complex weights.

    It is one small product of psi with the rank-one factors; applying W_1 and W_2 to the field in turn would cost
    several times the operations and a field of I channels in memory.
    """
    return _weigh(psi, rank_one_factors(mix_in, mix_out))


def rank_one_factors(mix_in: Tensor, mix_out: Tensor) -> Tensor:
    """The products of column i of W_2 with row i of W_1: [I, G, G], or [I, 2, G, G] for complex weights."""
    if mix_in.dim() == 2:
        return mix_out.T[..., None] * mix_in[:, None]
    out, (real, imaginary) = mix_out.permute(2, 0, 1)[..., None], mix_in[:, :, None, None]
    return out * real + _times_i(out) * imaginary


def _weigh(psi: Tensor, factors: Tensor) -> Tensor:
    """The sum over i of psi [B, N, I] times factors [I, ...]: [B, N, ...]."""
    return (psi @ factors.flatten(1)).unflatten(-1, factors.shape[1:])


def _rows(field: Tensor, parts: int) -> Tensor:
    """Heads as rows of real numbers, [B, H, N, D] -> [B, N, H, D], or with two parts [B, N, 2 H, D / 2]: the real and
    the imaginary part of head 1, of head 2 and so on.
    """
    return field.transpose(1, 2).unflatten(-1, (parts, -1)).flatten(2, 3).contiguous()


def _mix(weight: Tensor, rows: Tensor) -> Tensor:
    """One matrix [P, Q] times the rows of every token, [B, N, Q, D] -> [B, N, P, D].

    As a product for every token: one product for all would copy the rows, since those that it sums over lie apart.
    """
    return weight.expand(*rows.shape[:2], -1, -1) @ rows


def _matrices_of_rows(weight: Tensor, dims: int) -> Tensor:
    """Weights as real matrices that act on `_rows`: [..., P, Q] as they are, complex ones [..., 2, P, Q] as
    [..., 2 P, 2 Q]. dims: the number of axes of a real weight.
    """
    if weight.dim() == dims:
        return weight
    # a + bi maps real and imaginary parts by the columns (a, b) and (-b, a)
    both = torch.stack((weight, _times_i(weight)), dim=-1)
    return both.transpose(-4, -3).flatten(-2).flatten(-3, -2)


def _times_i(weight: Tensor) -> Tensor:
    """i times complex weights [..., 2, P, Q]."""
    # not torch.cat, of which the compiler makes kernels of their own
    signs = torch.arange(-1, 2, 2, dtype=weight.dtype, device=weight.device)
    return weight.flip(-3) * signs[:, None, None]
