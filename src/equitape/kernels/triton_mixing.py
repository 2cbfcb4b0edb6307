"""The field update with complex weights, given the mixing matrix of every token: forward and backward, each in one pass
over the fields.

    x = z + W_a c      y = x + T x      y / rms(y) if normalize

and, with g the gradient of y,

    dz = g + T^H g      dc = W_a^H dz      dW_a = sum of dz c^H      dT = g x^H

T of all tokens is a matrix product of its own (reference.mixing_matrices), and so are the gradients of what it is made
from: a kernel that also formed them would need several times the registers. Real and imaginary parts are separate
tiles; weights are pairs of matrices.

Every program adds up its part of dW_a in float32; a second kernel adds the parts in a fixed order.

Shapes: S tokens of a tile, R padded key-value heads, C padded query heads, E frequencies of a chunk, M of a field.
"""

# mypy: allow-untyped-defs, no-check-untyped-defs

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Launch, launch
from .reference import EPSILON
from .triton_backward import SUM_COLUMNS, SUM_ROWS, sum_kernel
from .triton_complex import (
    adjoint_times,
    carried,
    load_matrix,
    load_pair,
    mixed,
    store_matrix,
    store_pair,
    times_adjoint,
)
from .triton_field import (
    LANGUAGE_TYPES,
    UNIT,
    add_identity,
    by_head,
    by_token,
    contiguous,
    dense,
    num_programs,
    num_tiles,
    rows_of,
    shared_memory,
    strides,
)

CHUNK = 32
WARPS = 1
"""Warps of a program, one per token; measured: programs of two and four were slower."""
FORWARD_PROGRAMS, BACKWARD_PROGRAMS = 12, 8
"""Programs per processor, as many as their registers allow."""


@triton.jit
def mix_kernel(
    updated,
    field,
    attended,
    mixing,
    carry,
    field_by_sequence,
    field_by_head,
    field_by_token,
    attended_by_sequence,
    attended_by_head,
    attended_by_token,
    tokens,
    num_tiles,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    M: tl.constexpr,
    S: tl.constexpr,
    E: tl.constexpr,
    HAS_CARRY: tl.constexpr,
    HAS_MIX: tl.constexpr,
    NORMALIZE: tl.constexpr,
    EPSILON: tl.constexpr,
    EXACT: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """y of every token, divided by its root mean square if NORMALIZE; updated and mixing are contiguous."""
    ONE_CHUNK: tl.constexpr = M <= E
    weight = (0.0, 0.0)
    if HAS_CARRY:
        several = carry + tl.zeros((S, 1, 1), tl.int32)
        weight = load_matrix(several, GROUPS, HEADS, PADDED_GROUPS, PADDED_HEADS)
    field_strides = (field_by_sequence, field_by_head, field_by_token)
    attended_strides = (attended_by_sequence, attended_by_head, attended_by_token)
    updated_strides = by_head(tokens, GROUPS, 2 * M)
    tiles_per_sequence = tl.cdiv(tokens, S)
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        sequence = (tile // tiles_per_sequence).to(tl.int64)
        token = (tile % tiles_per_sequence) * S + tl.arange(0, S)
        rows, exists = rows_of(field_strides, sequence, token, tokens, GROUPS, PADDED_GROUPS, M, 1)
        to_rows, _ = rows_of(updated_strides, sequence, token, tokens, GROUPS, PADDED_GROUPS, M, 1)
        attended_rows, arrived = rows_of(attended_strides, sequence, token, tokens, HEADS, PADDED_HEADS, M, 1)
        matrix = (0.0, 0.0)
        if HAS_MIX:
            place = ((sequence * tokens + token) * (2 * GROUPS * GROUPS))[:, None, None]
            here = (token < tokens)[:, None, None]
            matrix = load_matrix(mixing + place, GROUPS, GROUPS, PADDED_GROUPS, PADDED_GROUPS, here)
        if NORMALIZE:
            squares = tl.zeros((S, PADDED_GROUPS), tl.float32)
            for start in tl.static_range(0, M, E):
                z = load_pair(field, rows, exists, start, M, E)
                c = (0.0, 0.0)
                if HAS_CARRY:
                    c = load_pair(attended, attended_rows, arrived, start, M, E)
                x = carried(z, c, weight, HAS_CARRY, EXACT, COMPUTE)
                y = mixed(x, matrix, HAS_MIX, COMPUTE)
                squares += tl.sum(y[0] * y[0] + y[1] * y[1], 2)
            scale = tl.rsqrt(squares * (1.0 / M) + EPSILON)[:, :, None]
        for start in tl.static_range(0, M, E):
            if not (NORMALIZE and ONE_CHUNK):
                z = load_pair(field, rows, exists, start, M, E)
                c = (0.0, 0.0)
                if HAS_CARRY:
                    c = load_pair(attended, attended_rows, arrived, start, M, E)
                x = carried(z, c, weight, HAS_CARRY, EXACT, COMPUTE)
                y = mixed(x, matrix, HAS_MIX, COMPUTE)
            if NORMALIZE:
                store_pair(updated, to_rows, exists, start, (y[0] * scale, y[1] * scale), M, E)
            else:
                store_pair(updated, to_rows, exists, start, y, M, E)


@triton.jit
def mix_gradient_kernel(
    grad_field,
    attended_gradient,
    grad_mixing,
    partial_sums,
    gradient,
    field,
    attended,
    mixing,
    carry,
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
    num_tiles,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    M: tl.constexpr,
    S: tl.constexpr,
    E: tl.constexpr,
    HAS_CARRY: tl.constexpr,
    HAS_MIX: tl.constexpr,
    NORMALIZE: tl.constexpr,
    EPSILON: tl.constexpr,
    EXACT: tl.constexpr,
    EXACT_GRADIENT: tl.constexpr,
    COMPUTE: tl.constexpr,
    WANTS_FIELD: tl.constexpr,
):
    """Gradients of the fields and the mixing matrices; each row of partial_sums has one program's part of dW_a.

    Outputs are contiguous, except the gradient of the attended field, where the heads of a token are adjacent.
    """
    ONE_CHUNK: tl.constexpr = M <= E
    weight = (0.0, 0.0)
    if HAS_CARRY:
        several = carry + tl.zeros((S, 1, 1), tl.int32)
        weight = load_matrix(several, GROUPS, HEADS, PADDED_GROUPS, PADDED_HEADS)
        # the tokens of a tile belong to different warps, so they are summed only at the end
        sum_real = tl.zeros((S, PADDED_GROUPS, PADDED_HEADS), tl.float32)
        sum_imaginary = tl.zeros((S, PADDED_GROUPS, PADDED_HEADS), tl.float32)
    gradient_strides = (gradient_by_sequence, gradient_by_head, gradient_by_token)
    field_strides = (field_by_sequence, field_by_head, field_by_token)
    attended_strides = (attended_by_sequence, attended_by_head, attended_by_token)
    grad_field_strides = by_head(tokens, GROUPS, 2 * M)
    attended_gradient_strides = by_token(tokens, HEADS, 2 * M)
    tiles_per_sequence = tl.cdiv(tokens, S)
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        sequence = (tile // tiles_per_sequence).to(tl.int64)
        token = (tile % tiles_per_sequence) * S + tl.arange(0, S)
        rows, exists = rows_of(field_strides, sequence, token, tokens, GROUPS, PADDED_GROUPS, M, 1)
        from_rows, _ = rows_of(gradient_strides, sequence, token, tokens, GROUPS, PADDED_GROUPS, M, 1)
        attended_rows, arrived = rows_of(attended_strides, sequence, token, tokens, HEADS, PADDED_HEADS, M, 1)
        matrix = (0.0, 0.0)
        place = ((sequence * tokens + token) * (2 * GROUPS * GROUPS))[:, None, None]
        here = (token < tokens)[:, None, None]
        if HAS_MIX:
            matrix = load_matrix(mixing + place, GROUPS, GROUPS, PADDED_GROUPS, PADDED_GROUPS, here)
        if NORMALIZE:
            squares = tl.zeros((S, PADDED_GROUPS), tl.float32)
            radial = tl.zeros((S, PADDED_GROUPS), tl.float32)
            for start in tl.static_range(0, M, E):
                z = load_pair(field, rows, exists, start, M, E)
                c = (0.0, 0.0)
                if HAS_CARRY:
                    c = load_pair(attended, attended_rows, arrived, start, M, E)
                x = carried(z, c, weight, HAS_CARRY, EXACT, COMPUTE)
                y = mixed(x, matrix, HAS_MIX, COMPUTE)
                g = load_pair(gradient, from_rows, exists, start, M, E)
                squares += tl.sum(y[0] * y[0] + y[1] * y[1], 2)
                radial += tl.sum(y[0] * g[0].to(tl.float32) + y[1] * g[1].to(tl.float32), 2)
            scale = tl.rsqrt(squares * (1.0 / M) + EPSILON)[:, :, None]
            radial = radial[:, :, None] * (1.0 / M) * scale * scale * scale

        if HAS_MIX:
            mix_real = tl.zeros((S, PADDED_GROUPS, PADDED_GROUPS), tl.float32)
            mix_imaginary = tl.zeros((S, PADDED_GROUPS, PADDED_GROUPS), tl.float32)
        for start in tl.static_range(0, M, E):
            if not (NORMALIZE and ONE_CHUNK):
                c = (0.0, 0.0)
                if HAS_CARRY:
                    c = load_pair(attended, attended_rows, arrived, start, M, E)
                if HAS_MIX or NORMALIZE:
                    z = load_pair(field, rows, exists, start, M, E)
                    x = carried(z, c, weight, HAS_CARRY, EXACT, COMPUTE)
                if NORMALIZE:
                    y = mixed(x, matrix, HAS_MIX, COMPUTE)
                g = load_pair(gradient, from_rows, exists, start, M, E)
            if NORMALIZE:
                g = (g[0].to(tl.float32) * scale - y[0] * radial, g[1].to(tl.float32) * scale - y[1] * radial)
            if HAS_MIX:
                outer = times_adjoint(g, x, COMPUTE)
                mix_real += outer[0]
                mix_imaginary += outer[1]
                dz = adjoint_times(matrix, g, COMPUTE)
                dz = (
                    add_identity(dz[0], g[0], EXACT_GRADIENT, COMPUTE),
                    add_identity(dz[1], g[1], EXACT_GRADIENT, COMPUTE),
                )
            else:
                dz = g
            if WANTS_FIELD:
                to_rows, _ = rows_of(grad_field_strides, sequence, token, tokens, GROUPS, PADDED_GROUPS, M, 1)
                store_pair(grad_field, to_rows, exists, start, dz, M, E)
            if HAS_CARRY:
                outer = times_adjoint(dz, c, COMPUTE)
                sum_real += outer[0]
                sum_imaginary += outer[1]
                to_rows, _ = rows_of(attended_gradient_strides, sequence, token, tokens, HEADS, PADDED_HEADS, M, 1)
                dc = adjoint_times(weight, dz, COMPUTE)
                store_pair(attended_gradient, to_rows, arrived, start, dc, M, E)
        if HAS_MIX:
            store_matrix(grad_mixing + place, (mix_real, mix_imaginary), GROUPS, GROUPS, here)

    if HAS_CARRY:
        partial_sums += tl.program_id(0) * (2 * GROUPS * HEADS)
        one = partial_sums + tl.zeros((1, 1, 1), tl.int32)
        totals = (tl.sum(sum_real, 0)[None, :, :], tl.sum(sum_imaginary, 0)[None, :, :])
        store_matrix(one, totals, GROUPS, HEADS)


def _constants(
    field: Tensor,
    attended: Tensor | None,
    mixing: Tensor | None,
    normalize: bool,
    num_fields: int,
    programs: int,
) -> dict[str, Any]:
    """Compile-time constants. num_fields: number of tensors [B, G, N, D] that the kernel reads."""
    given = attended if attended is not None else mixing
    assert given is not None
    groups, half = field.shape[1], field.shape[3] // 2
    heads = 1 if attended is None else attended.shape[1]
    padded_groups, padded_heads = (max(UNIT, triton.next_power_of_2(count)) for count in (groups, heads))
    rows = padded_groups * num_fields + padded_heads * (attended is not None)
    tile_bytes = WARPS * rows * field.shape[3] * given.dtype.itemsize
    return {
        "GROUPS": groups,
        "HEADS": heads,
        "PADDED_GROUPS": padded_groups,
        "PADDED_HEADS": padded_heads,
        "M": half,
        "S": WARPS,
        "E": max(UNIT, min(CHUNK, triton.next_power_of_2(half))),
        "HAS_CARRY": attended is not None,
        "HAS_MIX": mixing is not None,
        "NORMALIZE": normalize,
        "EPSILON": EPSILON,
        "EXACT": field.dtype == given.dtype != torch.float32,
        "COMPUTE": LANGUAGE_TYPES[given.dtype],
        "num_warps": WARPS,
        # tiles in flight at a time: those of all programs of a processor must fit
        "num_stages": max(1, min(3, shared_memory(field.device) // (programs * tile_bytes))),
    }


def forward(
    updated: Tensor,
    field: Tensor,
    attended: Tensor | None,
    mixing: Tensor | None,
    carry: Tensor | None,
    normalize: bool,
) -> None:
    """Write y to updated [B, G, N, D], contiguous; the field has its full batch. mixing: [B, N, 2, G, G]."""
    field, attended = dense(field), dense(attended)

    def describe() -> Launch:
        tiles = num_tiles(field, WARPS)
        return Launch(
            grid=(num_programs(field.device, tiles, FORWARD_PROGRAMS),),
            numbers=(*strides(field, 4), *strides(attended, 4), field.shape[2], tiles),
            constants=_constants(field, attended, mixing, normalize, 1, FORWARD_PROGRAMS),
        )

    launch(mix_kernel, (updated, field, attended, contiguous(mixing), contiguous(carry)), normalize, describe)


def backward(
    gradients: Sequence[Tensor],
    gradient: Tensor,
    field: Tensor,
    attended: Tensor | None,
    mixing: Tensor | None,
    carry: Tensor | None,
    normalize: bool,
    wants_field: bool,
) -> None:
    """Write the gradients of field, attended, mixing and carry, contiguous except that of the attended field: heads of
    a token adjacent.

    Gradients of tensors not given, and of the field unless wants_field, are not written.
    """
    grad_field, attended_gradient, grad_mixing, grad_carry = gradients
    gradient, field, attended = dense(gradient), dense(field), dense(attended)
    size = 0 if carry is None else carry.numel()
    tiles = num_tiles(field, WARPS)
    programs = num_programs(field.device, tiles, BACKWARD_PROGRAMS)
    partial_sums = torch.empty(programs, size, dtype=torch.float32, device=field.device)

    def describe() -> Launch:
        constants = _constants(field, attended, mixing, normalize, 2, BACKWARD_PROGRAMS)
        exact = constants["EXACT"] and gradient.dtype == field.dtype and not normalize
        return Launch(
            grid=(programs,),
            numbers=(*strides(gradient, 4), *strides(field, 4), *strides(attended, 4), field.shape[2], tiles),
            constants={**constants, "EXACT_GRADIENT": exact, "WANTS_FIELD": wants_field},
        )

    written = (grad_field, attended_gradient, grad_mixing, partial_sums)
    read = (gradient, field, attended, contiguous(mixing), contiguous(carry))
    launch(mix_gradient_kernel, (*written, *read), (normalize, wants_field), describe)
    if size:

        def sum_launch() -> Launch:
            sizes = {"CARRY_SIZE": size, "MIX_SIZE": 0, "ROWS": SUM_ROWS, "COLUMNS": SUM_COLUMNS}
            return Launch((triton.cdiv(size, SUM_COLUMNS),), (programs,), sizes)

        launch(sum_kernel, (grad_carry, grad_carry, grad_carry, partial_sums), size, sum_launch)
