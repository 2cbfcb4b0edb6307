"""TAPE's move, forward and backward: z + z conj(a) b, where a and b are mixtures of the heads of the attended field.

A program handles the tokens of a tile for one key-value head and reads all heads of the attended field. The programs
of a tile run together, so that they share these in the cache. Shapes: T tokens of a tile, M frequencies (padded to a
power of two), B batch, H query heads, G key-value heads.
"""

# mypy: allow-untyped-defs, no-check-untyped-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Plan, launch
from .triton_field import by_head, contiguous, dense, strides
from .triton_rotary import load_complex, store_complex

TILE = 1024
"""Complex numbers per field in a program."""


@triton.jit
def mixtures(
    attended, attended_strides, source, target, sequence, group, token, frequency, exists,
    HEADS: tl.constexpr, M: tl.constexpr, PADDED_M: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Real and imaginary parts [T, M] of a = source c and b = target c for one key-value head."""
    a_real = tl.zeros((T, PADDED_M), tl.float32)
    a_imaginary = tl.zeros((T, PADDED_M), tl.float32)
    b_real = tl.zeros((T, PADDED_M), tl.float32)
    b_imaginary = tl.zeros((T, PADDED_M), tl.float32)
    for head in tl.range(HEADS):
        real, imaginary = load_complex(attended, attended_strides, sequence, head, token, frequency, exists, M)
        of_a = tl.load(source + group * HEADS + head).to(tl.float32)
        of_b = tl.load(target + group * HEADS + head).to(tl.float32)
        a_real += of_a * real
        a_imaginary += of_a * imaginary
        b_real += of_b * real
        b_imaginary += of_b * imaginary
    return a_real, a_imaginary, b_real, b_imaginary


@triton.jit
def move_kernel(
    moved,
    field,
    attended,
    source,
    target,
    field_by_sequence,
    field_by_head,
    field_by_token,
    attended_by_sequence,
    attended_by_head,
    attended_by_token,
    tokens,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    M: tl.constexpr,
    PADDED_M: tl.constexpr,
    T: tl.constexpr,
):
    """z + z conj(a) b; moved is contiguous."""
    field_strides = (field_by_sequence, field_by_head, field_by_token)
    attended_strides = (attended_by_sequence, attended_by_head, attended_by_token)
    group = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1).to(tl.int64) * T + tl.arange(0, T)
    sequence = tl.program_id(2).to(tl.int64)
    frequency = tl.arange(0, PADDED_M)
    exists = (token < tokens)[:, None] & (frequency < M)[None, :]
    a_real, a_imaginary, b_real, b_imaginary = mixtures(
        attended, attended_strides, source, target, sequence, group, token, frequency, exists, HEADS, M, PADDED_M, T
    )
    z_real, z_imaginary = load_complex(field, field_strides, sequence, group, token, frequency, exists, M)
    # 1 + conj(a) b
    t_real = 1.0 + a_real * b_real + a_imaginary * b_imaginary
    t_imaginary = a_real * b_imaginary - a_imaginary * b_real
    store_complex(
        moved, by_head(tokens, GROUPS, 2 * M), sequence, group, token, frequency, exists,
        z_real * t_real - z_imaginary * t_imaginary, z_real * t_imaginary + z_imaginary * t_real, M,
    )  # fmt: skip


@triton.jit
def move_backward_kernel(
    grad_field,
    grad_mixtures,
    grad_weights,
    gradient,
    field,
    attended,
    source,
    target,
    gradient_by_sequence,
    gradient_by_head,
    gradient_by_token,
    field_by_sequence,
    field_by_head,
    field_by_token,
    attended_by_sequence,
    attended_by_head,
    attended_by_token,
    tokens,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    M: tl.constexpr,
    PADDED_M: tl.constexpr,
    T: tl.constexpr,
):
    """Gradients of z, a and b, and this tile's part of those of the weights.

    With t = conj(a) b and y = z (1 + t): dz = conj(1 + t) dy, dt = conj(z) dy, da = b conj(dt), db = a dt.
    grad_mixtures: [B, 2 G, N, D], those of a first; grad_weights: [B, tiles, 2, G, H]. Both contiguous, as grad_field.
    """
    gradient_strides = (gradient_by_sequence, gradient_by_head, gradient_by_token)
    field_strides = (field_by_sequence, field_by_head, field_by_token)
    attended_strides = (attended_by_sequence, attended_by_head, attended_by_token)
    group = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1).to(tl.int64) * T + tl.arange(0, T)
    sequence = tl.program_id(2).to(tl.int64)
    frequency = tl.arange(0, PADDED_M)
    exists = (token < tokens)[:, None] & (frequency < M)[None, :]
    a_real, a_imaginary, b_real, b_imaginary = mixtures(
        attended, attended_strides, source, target, sequence, group, token, frequency, exists, HEADS, M, PADDED_M, T
    )
    z_real, z_imaginary = load_complex(field, field_strides, sequence, group, token, frequency, exists, M)
    g_real, g_imaginary = load_complex(gradient, gradient_strides, sequence, group, token, frequency, exists, M)
    t_real = 1.0 + a_real * b_real + a_imaginary * b_imaginary
    t_imaginary = a_real * b_imaginary - a_imaginary * b_real
    store_complex(
        grad_field, by_head(tokens, GROUPS, 2 * M), sequence, group, token, frequency, exists,
        t_real * g_real + t_imaginary * g_imaginary, t_real * g_imaginary - t_imaginary * g_real, M,
    )  # fmt: skip
    # dt
    g_real, g_imaginary = z_real * g_real + z_imaginary * g_imaginary, z_real * g_imaginary - z_imaginary * g_real
    da_real, da_imaginary = b_real * g_real + b_imaginary * g_imaginary, b_imaginary * g_real - b_real * g_imaginary
    db_real, db_imaginary = a_real * g_real - a_imaginary * g_imaginary, a_real * g_imaginary + a_imaginary * g_real
    mixture_strides = by_head(tokens, 2 * GROUPS, 2 * M)
    store_complex(grad_mixtures, mixture_strides, sequence, group, token, frequency, exists, da_real, da_imaginary, M)
    store_complex(
        grad_mixtures, mixture_strides, sequence, GROUPS + group, token, frequency, exists, db_real, db_imaginary, M
    )
    tile = sequence * tl.num_programs(1) + tl.program_id(1)
    for head in tl.range(HEADS):
        real, imaginary = load_complex(attended, attended_strides, sequence, head, token, frequency, exists, M)
        at = grad_weights + (tile * 2 * GROUPS + group) * HEADS + head
        tl.store(at, tl.sum(real * da_real + imaginary * da_imaginary))
        tl.store(at + GROUPS * HEADS, tl.sum(real * db_real + imaginary * db_imaginary))


def _constants(field: Tensor, attended: Tensor) -> dict[str, int]:
    _, groups, _, dim = field.shape
    padded = triton.next_power_of_2(dim // 2)
    tile = max(1, TILE // padded)
    return {"GROUPS": groups, "HEADS": attended.shape[1], "M": dim // 2, "PADDED_M": padded, "T": tile}


def forward(moved: Tensor, field: Tensor, attended: Tensor, source: Tensor, target: Tensor) -> None:
    """Write reference.move_field to moved [B, G, N, D], contiguous; the field has its full batch."""
    field, attended = dense(field), dense(attended)

    def plan() -> Plan:
        batch, groups, tokens, _ = field.shape
        constants = _constants(field, attended)
        return Plan(
            grid=(groups, triton.cdiv(tokens, constants["T"]), batch),
            numbers=(*strides(field, 4), *strides(attended, 4), tokens),
            constants=constants,
        )

    launch(move_kernel, (moved, field, attended, contiguous(source), contiguous(target)), None, plan)


def backward(
    gradient: Tensor, field: Tensor, attended: Tensor, source: Tensor, target: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of field, attended, source and target."""
    gradient, field, attended = dense(gradient), dense(field), dense(attended)
    batch, groups, tokens, dim = field.shape
    heads = attended.shape[1]
    constants = _constants(field, attended)
    tiles = triton.cdiv(tokens, constants["T"])
    grad_field = torch.empty_like(field, memory_format=torch.contiguous_format)
    grad_mixtures = attended.new_empty(batch, 2 * groups, tokens, dim)
    grad_weights = attended.new_empty(batch, tiles, 2, groups, heads, dtype=torch.float32)
    results = (grad_field, grad_mixtures, grad_weights)
    weights = (contiguous(source), contiguous(target))

    def plan() -> Plan:
        numbers = (*strides(gradient, 4), *strides(field, 4), *strides(attended, 4), tokens)
        return Plan(grid=(groups, tiles, batch), numbers=numbers, constants=constants)

    launch(move_backward_kernel, (*results, gradient, field, attended, *weights), None, plan)
    # both mixtures at once; a product over so few heads is bound by memory
    both = torch.cat((source, target)).to(grad_mixtures.dtype)
    grad_attended = (both.T @ grad_mixtures.flatten(2)).view(batch, heads, tokens, dim)
    of_source, of_target = (grad_weights[:, :, index].sum((0, 1)) for index in (0, 1))
    return grad_field, grad_attended, of_source.to(source.dtype), of_target.to(target.dtype)
