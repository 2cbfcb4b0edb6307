"""The operators of TAPE as functions: fused in Triton on CUDA (but `move_field`), plain PyTorch elsewhere
(EQUITAPE_KERNELS chooses).

All of them support autograd (but `update_token`), torch.compile and CUDA graphs. Fields are complex numbers stored
half-split in real tensors: real parts in the first half of the last axis, imaginary parts in the second.

Shapes: B batch, N tokens, H query heads, G key-value heads, D head dimension, I mixer size, C hidden size.
"""

import torch
from torch import Tensor

from . import kernels
from .encodings import phasors as fields

__all__ = ["apply_rotary", "move_field", "phasors", "update_field", "update_token"]


def phasors(ids: Tensor, frequencies: Tensor, dtype: torch.dtype) -> Tensor:
    """The field of RoPE, exp(i theta_m p): [B, 1, N, D], the same for all heads.

    Args:
        ids: p, [B, N]; [B, G, N] if positions differ by head, which gives [B, G, N, D]; [B, N, A] with several axes.
        frequencies: theta, [D / 2]; [A, D / 2] with several axes. Use float64: half precision rounds large angles.
        dtype: Of the field.
    """
    several = frequencies.dim() == 2
    if not (frequencies.dim() == 1 and ids.dim() in (2, 3)) and not (
        several and ids.dim() == 3 and ids.shape[-1] == frequencies.shape[0]
    ):
        raise ValueError(
            f"ids has shape {list(ids.shape)} and frequencies {list(frequencies.shape)}; they must be [B, N] or "
            f"[B, G, N] and [D / 2], or with several axes [B, N, A] and [A, D / 2]."
        )
    return fields.phasors(ids, frequencies, dtype)


def apply_rotary(query: Tensor, key: Tensor, field: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by a field: y = z x, each head by the phasors of its key-value head.

    The backward pass keeps the rotated queries and keys, which attention keeps anyway, and computes all three gradients
    in one kernel.

    Args:
        query: [B, H, N, D].
        key: [B, G, N, D].
        field: [B or 1, G or 1, N, D].
    """
    check_field(field)
    for name, x in (("query", query), ("key", key)):
        check_heads(name, x, field)
    if query.shape[0] != key.shape[0] or query.shape[1] % key.shape[1]:
        raise ValueError(
            f"query has shape {list(query.shape)} and key {list(key.shape)}; they must have equally many rows, and "
            f"query a multiple of key's heads."
        )
    return fields.apply_rotary(query, key, field)


def update_field(
    field: Tensor,
    attended: Tensor | None,
    gate: Tensor | None,
    carry: Tensor | None,
    mix_in: Tensor | None,
    mix_out: Tensor | None,
    normalize: bool = False,
) -> Tensor:
    """Update a field: z' = z + W_a c, then z'' = z' + W_2 diag(silu(gate)) W_1 z', then z'' / rms(z'') if normalize.

    Args:
        field: z, [B or 1, G, N, D].
        attended: c, [B, H, N, D], the attention average of the field; None, with carry None, leaves out the first step.
        gate: [B, N, I]; None, with mix_in and mix_out None, leaves out the second step.
        carry: W_a, [G, H]. Complex weights have a leading axis of two: real part, imaginary part.
        mix_in: W_1, [I, G].
        mix_out: W_2, [G, I].
        normalize: Divide by the root mean square over the frequencies of each token and head.
    """
    check_field(field)
    check_together({"attended": attended, "carry": carry})
    check_together({"gate": gate, "mix_in": mix_in, "mix_out": mix_out})
    if attended is not None and carry is not None:
        check_heads("attended", attended, field)
        check_weight("carry", carry, (field.shape[1], attended.shape[1]))
    if gate is not None and mix_in is not None and mix_out is not None:
        check_tokens("gate", gate, field, attended)
        check_weight("mix_in", mix_in, (gate.shape[-1], field.shape[1]))
        check_weight("mix_out", mix_out, (field.shape[1], gate.shape[-1]))
    return kernels.update_field(field, attended, gate, carry, mix_in, mix_out, normalize)


def update_token(
    field: Tensor,
    attended: Tensor | None,
    features: Tensor,
    gate_weight: Tensor,
    carry: Tensor | None,
    mix_in: Tensor,
    mix_out: Tensor,
    normalize: bool = False,
) -> Tensor:
    """`update_field` for one token per sequence, with the gates computed inside: for decoding, without gradients.

    Args:
        field: [B or 1, G, 1, D].
        attended: [B, H, 1, D], or None with carry None.
        features: x, [B, 1, C]; the gates are x W_x^T.
        gate_weight: W_x, [I, C].
        carry: [G, H].
        mix_in: [I, G].
        mix_out: [G, I].
        normalize: As in `update_field`.
    """
    check_field(field)
    check_together({"attended": attended, "carry": carry})
    if features.dim() != 3 or features.shape[1] != 1 or field.shape[2] != 1:
        raise ValueError(
            f"features has shape {list(features.shape)} and the field {list(field.shape)}; this operator takes one "
            f"token per sequence: use update_field."
        )
    if attended is not None and carry is not None:
        check_heads("attended", attended, field)
        check_weight("carry", carry, (field.shape[1], attended.shape[1]))
    check_tokens("features", features, field, attended)
    check_weight("gate_weight", gate_weight, (mix_in.shape[-2], features.shape[-1]))
    check_weight("mix_in", mix_in, (mix_in.shape[-2], field.shape[1]))
    check_weight("mix_out", mix_out, (field.shape[1], mix_in.shape[-2]))
    return kernels.update_token(field, attended, features, gate_weight, carry, mix_in, mix_out, normalize)


def move_field(field: Tensor, attended: Tensor, source: Tensor, target: Tensor) -> Tensor:
    """Move a field by the distance between what two mixtures of heads attend to: z + z conj(source c) (target c).

    Args:
        field: z, [B or 1, G, N, D].
        attended: c, [B, H, N, D].
        source: [G, H].
        target: [G, H].
    """
    check_field(field)
    check_heads("attended", attended, field)
    for name, weight in (("source", source), ("target", target)):
        check_weight(name, weight, (field.shape[1], attended.shape[1]))
    return kernels.move_field(field, attended, source, target)


def check_field(field: Tensor) -> None:
    """Require [B, G, N, D] with an even D."""
    if field.dim() != 4 or field.shape[-1] % 2:
        raise ValueError(f"The field has shape {list(field.shape)}; it must be [B, G, N, D] with an even D.")


def check_heads(name: str, x: Tensor, field: Tensor) -> None:
    """Require heads [B, a multiple of G, N, D]."""
    if (
        x.dim() != 4
        or x.shape[1] % field.shape[1]
        or x.shape[2:] != field.shape[2:]
        or (field.shape[0] not in (1, x.shape[0]))
    ):
        raise ValueError(
            f"{name} has shape {list(x.shape)}, which does not fit the field {list(field.shape)}; it must be [B, a "
            f"multiple of {field.shape[1]}, {field.shape[2]}, {field.shape[3]}]."
        )


def check_tokens(name: str, x: Tensor, field: Tensor, attended: Tensor | None) -> None:
    """Require numbers of every token, [B, N, any]: the kernels do not repeat those of one row or token for others."""
    rows = x.shape[0] if field.shape[0] == 1 else field.shape[0]
    rows = rows if attended is None else attended.shape[0]
    if x.dim() != 3 or list(x.shape[:2]) != [rows, field.shape[2]]:
        raise ValueError(
            f"{name} has shape {list(x.shape)}, which does not fit the field {list(field.shape)}; it must be "
            f"[{rows}, {field.shape[2]}, any]."
        )


def check_weight(name: str, weight: Tensor, shape: tuple[int, int]) -> None:
    """Require a matrix, or a complex one with a leading axis of two."""
    if weight.shape[-2:] != shape or weight.dim() > 3 or (weight.dim() == 3 and weight.shape[0] != 2):
        raise ValueError(
            f"{name} has shape {list(weight.shape)}; it must be {list(shape)} or {[2, *shape]} if complex."
        )


def check_together(tensors: dict[str, Tensor | None]) -> None:
    """Require all or none."""
    missing = [name for name, tensor in tensors.items() if tensor is None]
    if missing and len(missing) < len(tensors):
        raise ValueError(
            f"{' and '.join(tensors)} belong together, but {', '.join(missing)} is None; give all or none."
        )
