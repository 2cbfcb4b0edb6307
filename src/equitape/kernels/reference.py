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
    a, b = (_mix_heads(weight.to(attended.dtype), attended) for weight in (source, target))
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
    if attended is not None and carry is not None:
        field = field + _mix_heads(carry, attended)
    if gate is not None and mix_in is not None and mix_out is not None:
        field = field + _mix_heads(mixing_matrices(torch.nn.functional.silu(gate), mix_in, mix_out), field)
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries x, keys x and field z through y = z x, from the gradients dy and the rotated y.

    dx = conj(z) dy; dz = conj(x) dy = z / |z|^2 conj(y) dy, summed over all heads that share z. Queries [B, H, N, D],
    keys and field [B, G, N, D]. replaced: number of lowest frequencies without a gradient dy. changed: those of
    `put_frequencies`, which get a gradient instead of the field.
    """
    if changed is not None:
        whole = put_frequencies(field, changed)
        of_query, of_key, of_whole = apply_rotary_backward(grad_query, grad_key, query, key, whole, replaced)
        return of_query, of_key, take_frequencies(of_whole, changed.shape[-1] // 2)
    wide = torch.promote_types(field.dtype, torch.float32)
    groups = field.shape[1]
    z = field.to(wide)[:, :, None]
    total = torch.zeros_like(field, dtype=wide)
    gradients = []
    for gradient, rotated in ((grad_query, query), (grad_key, key)):
        # heads as [groups, heads of a group]
        g, y = (each.to(wide).unflatten(1, (groups, -1)) for each in (gradient, rotated))
        if replaced:
            halves = [half[..., : half.shape[-1] - replaced] for half in g.chunk(2, dim=-1)]
            g = torch.cat([torch.nn.functional.pad(half, (0, replaced)) for half in halves], dim=-1)
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
    """T = W_2 diag(psi) W_1 of every token: [B, N, G, G], with a leading axis of two for complex weights.

    It is formed first, as one small product of psi with the I rank-one factors; applying W_1 and W_2 to the field in
    turn would cost several times the operations and a field of I channels in memory.
    """
    # [I, G, 1] and [I, 1, G], with the axis of two: products of these are the rank-one factors [I, G, G]
    out, into = mix_out.mT[..., None], mix_in[..., None, :]
    if mix_in.dim() == 2:
        return torch.einsum("bni,igh->bngh", psi, out * into)
    (a, b), (c, d) = out, into
    return torch.einsum("bni,cigh->cbngh", psi, torch.stack((a * c - b * d, a * d + b * c)))


def _mix_heads(weight: Tensor, field: Tensor) -> Tensor:
    """Multiply the head axis of a field [B, H, N, D] by [G, H], by [B, N, G, H], or by complex versions of these."""
    per_token = weight.dim() >= 4
    pattern = "bngh,bhnd->bgnd" if per_token else "gh,bhnd->bgnd"
    if weight.dim() in (3, 5):
        real, imaginary = field.chunk(2, dim=-1)
        turned = torch.cat((-imaginary, real), dim=-1)
        return torch.einsum(pattern, weight[0], field) + torch.einsum(pattern, weight[1], turned)
    return torch.einsum(pattern, weight, field)
