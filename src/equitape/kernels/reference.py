"""The update of TAPE's field in plain PyTorch: the definition that faster kernels are tested against.

Shapes: B batch, N tokens, H query heads, G key-value heads, D head dimension, I mixer size. Fields are complex numbers
held half-split, real parts first. Complex weights carry a leading axis of two: real part, imaginary part.
"""

import torch
from torch import Tensor

EPSILON = 1e-8


def update_field(
    field: Tensor,
    carried: Tensor | None,
    gate: Tensor | None,
    carry: Tensor | None,
    mix_in: Tensor | None,
    mix_out: Tensor | None,
    normalize: bool = False,
) -> Tensor:
    """z' = z + W_a c, then z'' = z' + W_2 diag(psi) W_1 z', then z'' / rms(z'') if asked.

    field: [B or 1, G, N, D]; carried: [B, H, N, D] with carry [G, H], or both None; gate: [B, N, I] with mix_in [I, G]
    and mix_out [G, I], or all None. Returns [B, G, N, D].
    """
    if carried is not None and carry is not None:
        field = field + _mix_heads(carry, carried)
    if gate is not None and mix_in is not None and mix_out is not None:
        field = field + _mix_heads(mixing_matrices(gate, mix_in, mix_out), field)
    if normalize:
        # |z|^2 averaged over the D / 2 frequencies
        wide = field.to(torch.promote_types(field.dtype, torch.float32))
        square = 2 * wide.square().mean(-1, keepdim=True)
        field = field * torch.rsqrt(square + EPSILON).to(field.dtype)
    return field


def mixing_matrices(gate: Tensor, mix_in: Tensor, mix_out: Tensor) -> Tensor:
    """T = W_2 diag(psi) W_1 of every token: [B, N, G, G], with a leading axis of two where the weights are complex.

    Formed first, one small product of psi with the I rank-one factors; applying W_1 and W_2 to the field one after the
    other would cost several times the operations and a field of I channels in memory.
    """

    def rank_one(out: Tensor, into: Tensor) -> Tensor:
        return torch.einsum("gi,ih->igh", out, into)

    if mix_in.dim() == 2:
        return torch.einsum("bni,igh->bngh", gate, rank_one(mix_out, mix_in))
    real = rank_one(mix_out[0], mix_in[0]) - rank_one(mix_out[1], mix_in[1])
    imaginary = rank_one(mix_out[0], mix_in[1]) + rank_one(mix_out[1], mix_in[0])
    return torch.einsum("bni,cigh->cbngh", gate, torch.stack((real, imaginary)))


def _mix_heads(weight: Tensor, field: Tensor) -> Tensor:
    """Multiply the head axis of a field [B, H, N, D] by [G, H], by [B, N, G, H], or by complex versions of these."""
    per_token = weight.dim() >= 4
    pattern = "bngh,bhnd->bgnd" if per_token else "gh,bhnd->bgnd"
    if weight.dim() in (3, 5):
        real, imaginary = field.chunk(2, dim=-1)
        turned = torch.cat((-imaginary, real), dim=-1)
        return torch.einsum(pattern, weight[0], field) + torch.einsum(pattern, weight[1], turned)
    return torch.einsum(pattern, weight, field)
