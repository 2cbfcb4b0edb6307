"""TAPE's move, forward and backward: z + z conj(a) b, where a and b are mixtures of the heads of the attended field.

A program handles all heads of some columns, one column per token and frequency: it reads every field once and mixes
heads on the matrix units. Shapes: X columns of a tile, M frequencies (padded to a power of two), B batch, H query
heads, G key-value heads (both padded to powers of two).
"""

# mypy: allow-untyped-defs, no-check-untyped-defs

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Launch, launch
from .triton_field import (
    LANGUAGE_TYPES,
    UNIT,
    by_head,
    by_token,
    contiguous,
    dense,
    load_weight,
    multiply,
    rounded,
    strides,
)

FORWARD_TILE = 2048
"""Complex numbers per field in a program's tile."""
BACKWARD_TILE = 256
STEPS = 8
"""Tiles of a program of the backward pass, which adds up what they give the weights."""


@triton.jit
def place(
    strides, sequence, start, tokens, HEADS: tl.constexpr, PADDED: tl.constexpr, M, PADDED_M: tl.constexpr,
    X: tl.constexpr,
):  # fmt: skip
    """Offsets of the real parts of a tile, [PADDED, X], and which of them exist. strides: as in rows_of."""
    head = tl.arange(0, PADDED)[:, None]
    column = start + tl.arange(0, X)[None, :]
    token, frequency = column // PADDED_M, column % PADDED_M
    at = sequence * strides[0] + head.to(tl.int64) * strides[1] + token * strides[2] + frequency
    return at, (head < HEADS) & (frequency < M) & (token < tokens)


@triton.jit
def load_field(pointer, at, exists, M: tl.constexpr):
    """Real and imaginary parts."""
    return tl.load(pointer + at, mask=exists, other=0.0), tl.load(pointer + at + M, mask=exists, other=0.0)


@triton.jit
def store_field(pointer, at, exists, real, imaginary, M: tl.constexpr):
    """Store what load_field loads."""
    tl.store(pointer + at, rounded(real, pointer.dtype.element_ty), mask=exists)
    tl.store(pointer + at + M, rounded(imaginary, pointer.dtype.element_ty), mask=exists)


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
    PADDED_GROUPS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    M: tl.constexpr,
    PADDED_M: tl.constexpr,
    X: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """z + z conj(a) b; moved is contiguous."""
    field_strides = (field_by_sequence, field_by_head, field_by_token)
    attended_strides = (attended_by_sequence, attended_by_head, attended_by_token)
    moved_strides = by_head(tokens, GROUPS, 2 * M)
    sequence, start = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64) * X
    at, exists = place(attended_strides, sequence, start, tokens, HEADS, PADDED_HEADS, M, PADDED_M, X)
    c_real, c_imaginary = load_field(attended, at, exists, M)
    at, exists = place(field_strides, sequence, start, tokens, GROUPS, PADDED_GROUPS, M, PADDED_M, X)
    z_real, z_imaginary = load_field(field, at, exists, M)
    source = load_weight(source, GROUPS, HEADS, PADDED_GROUPS, PADDED_HEADS, 1)
    target = load_weight(target, GROUPS, HEADS, PADDED_GROUPS, PADDED_HEADS, 1)
    a_real, a_imaginary = multiply(source, c_real, COMPUTE), multiply(source, c_imaginary, COMPUTE)
    b_real, b_imaginary = multiply(target, c_real, COMPUTE), multiply(target, c_imaginary, COMPUTE)
    # 1 + conj(a) b
    t_real = 1.0 + a_real * b_real + a_imaginary * b_imaginary
    t_imaginary = a_real * b_imaginary - a_imaginary * b_real
    z_real, z_imaginary = z_real.to(tl.float32), z_imaginary.to(tl.float32)
    at, exists = place(moved_strides, sequence, start, tokens, GROUPS, PADDED_GROUPS, M, PADDED_M, X)
    store_field(
        moved, at, exists,
        z_real * t_real - z_imaginary * t_imaginary, z_real * t_imaginary + z_imaginary * t_real, M,
    )  # fmt: skip


@triton.jit
def move_backward_kernel(
    grad_field,
    grad_attended,
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
    PADDED_GROUPS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    M: tl.constexpr,
    PADDED_M: tl.constexpr,
    X: tl.constexpr,
    COMPUTE: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Gradients of z and c, and this program's part of those of the weights.

    With t = conj(a) b and y = z (1 + t): dz = conj(1 + t) dy, dt = conj(z) dy, da = b conj(dt), db = a dt, and
    dc = source^T da + target^T db. grad_field is contiguous; in grad_attended the heads of a token are adjacent;
    grad_weights: [B, programs, 2, G, H].
    """
    gradient_strides = (gradient_by_sequence, gradient_by_head, gradient_by_token)
    field_strides = (field_by_sequence, field_by_head, field_by_token)
    attended_strides = (attended_by_sequence, attended_by_head, attended_by_token)
    grad_field_strides = by_head(tokens, GROUPS, 2 * M)
    grad_attended_strides = by_token(tokens, HEADS, 2 * M)
    sequence = tl.program_id(1).to(tl.int64)
    source = load_weight(source, GROUPS, HEADS, PADDED_GROUPS, PADDED_HEADS, 1)
    target = load_weight(target, GROUPS, HEADS, PADDED_GROUPS, PADDED_HEADS, 1)
    of_source = tl.zeros((PADDED_GROUPS, PADDED_HEADS), tl.float32)
    of_target = tl.zeros((PADDED_GROUPS, PADDED_HEADS), tl.float32)
    for step in tl.range(STEPS):
        start = (tl.program_id(0).to(tl.int64) * STEPS + step) * X
        at, exists = place(attended_strides, sequence, start, tokens, HEADS, PADDED_HEADS, M, PADDED_M, X)
        c_real, c_imaginary = load_field(attended, at, exists, M)
        at, exists = place(gradient_strides, sequence, start, tokens, GROUPS, PADDED_GROUPS, M, PADDED_M, X)
        g_real, g_imaginary = load_field(gradient, at, exists, M)
        at, exists = place(field_strides, sequence, start, tokens, GROUPS, PADDED_GROUPS, M, PADDED_M, X)
        z_real, z_imaginary = load_field(field, at, exists, M)
        g_real, g_imaginary = g_real.to(tl.float32), g_imaginary.to(tl.float32)
        z_real, z_imaginary = z_real.to(tl.float32), z_imaginary.to(tl.float32)
        a_real, a_imaginary = multiply(source, c_real, COMPUTE), multiply(source, c_imaginary, COMPUTE)
        b_real, b_imaginary = multiply(target, c_real, COMPUTE), multiply(target, c_imaginary, COMPUTE)
        t_real = 1.0 + a_real * b_real + a_imaginary * b_imaginary
        t_imaginary = a_real * b_imaginary - a_imaginary * b_real
        at, exists = place(grad_field_strides, sequence, start, tokens, GROUPS, PADDED_GROUPS, M, PADDED_M, X)
        store_field(
            grad_field, at, exists,
            t_real * g_real + t_imaginary * g_imaginary, t_real * g_imaginary - t_imaginary * g_real, M,
        )  # fmt: skip
        # dt
        g_real, g_imaginary = z_real * g_real + z_imaginary * g_imaginary, z_real * g_imaginary - z_imaginary * g_real
        da_real, da_imaginary = b_real * g_real + b_imaginary * g_imaginary, b_imaginary * g_real - b_real * g_imaginary
        db_real, db_imaginary = a_real * g_real - a_imaginary * g_imaginary, a_real * g_imaginary + a_imaginary * g_real
        at, exists = place(grad_attended_strides, sequence, start, tokens, HEADS, PADDED_HEADS, M, PADDED_M, X)
        back, forth = tl.trans(source), tl.trans(target)
        store_field(
            grad_attended, at, exists,
            multiply(back, da_real, COMPUTE) + multiply(forth, db_real, COMPUTE),
            multiply(back, da_imaginary, COMPUTE) + multiply(forth, db_imaginary, COMPUTE), M,
        )  # fmt: skip
        # these sums over tokens are rounded nowhere
        c_real, c_imaginary = tl.trans(c_real.to(tl.float32)), tl.trans(c_imaginary.to(tl.float32))
        of_source += multiply(da_real, c_real, tl.float32) + multiply(da_imaginary, c_imaginary, tl.float32)
        of_target += multiply(db_real, c_real, tl.float32) + multiply(db_imaginary, c_imaginary, tl.float32)
    group, head = tl.arange(0, PADDED_GROUPS)[:, None], tl.arange(0, PADDED_HEADS)[None, :]
    program = sequence * tl.num_programs(0) + tl.program_id(0)
    weight = grad_weights + program * (2 * GROUPS * HEADS) + group * HEADS + head
    exists = (group < GROUPS) & (head < HEADS)
    tl.store(weight, of_source, mask=exists)
    tl.store(weight + GROUPS * HEADS, of_target, mask=exists)


def _constants(field: Tensor, attended: Tensor, tile: int) -> dict[str, Any]:
    groups, heads, half = field.shape[1], attended.shape[1], field.shape[3] // 2
    padded_groups, padded_heads = (max(UNIT, triton.next_power_of_2(count)) for count in (groups, heads))
    rows = max(padded_groups, padded_heads)
    columns = max(UNIT, tile // rows)
    return {
        "GROUPS": groups,
        "HEADS": heads,
        "PADDED_GROUPS": padded_groups,
        "PADDED_HEADS": padded_heads,
        "M": half,
        "PADDED_M": triton.next_power_of_2(half),
        "X": columns,
        "COMPUTE": LANGUAGE_TYPES[attended.dtype],
        # every thread holds about eight complex numbers per field
        "num_warps": max(1, rows * columns // 512),
    }


def forward(moved: Tensor, field: Tensor, attended: Tensor, source: Tensor, target: Tensor) -> None:
    """Write reference.move_field to moved [B, G, N, D], contiguous; the field has its full batch."""
    field, attended = dense(field), dense(attended)

    def describe() -> Launch:
        batch, _, tokens, _ = field.shape
        constants = _constants(field, attended, FORWARD_TILE)
        return Launch(
            grid=(triton.cdiv(tokens * constants["PADDED_M"], constants["X"]), batch),
            numbers=(*strides(field, 4), *strides(attended, 4), tokens),
            constants=constants,
        )

    launch(move_kernel, (moved, field, attended, contiguous(source), contiguous(target)), None, describe)


def backward(
    gradients: tuple[Tensor, Tensor, Tensor, Tensor],
    gradient: Tensor,
    field: Tensor,
    attended: Tensor,
    source: Tensor,
    target: Tensor,
) -> None:
    """Write the gradients of field (contiguous), attended (heads of a token adjacent), source and target."""
    gradient, field, attended = dense(gradient), dense(field), dense(attended)
    batch, groups, tokens, _ = field.shape
    constants = {**_constants(field, attended, BACKWARD_TILE), "STEPS": STEPS}
    programs = triton.cdiv(tokens * constants["PADDED_M"], constants["X"] * STEPS)
    parts = attended.new_empty(batch * programs, 2, groups, attended.shape[1], dtype=torch.float32)

    def describe() -> Launch:
        numbers = (*strides(gradient, 4), *strides(field, 4), *strides(attended, 4), tokens)
        return Launch(grid=(programs, batch), numbers=numbers, constants=constants)

    inputs = (gradient, field, attended, contiguous(source), contiguous(target))
    launch(move_backward_kernel, (*gradients[:2], parts, *inputs), None, describe)
    for written, total in zip(gradients[2:], parts.sum(0), strict=True):
        written.copy_(total)
