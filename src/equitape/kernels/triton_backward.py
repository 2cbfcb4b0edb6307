"""The field update, backward, in one pass over the fields, from the inputs of forward alone.

With g the gradient of z'' (of z'' before normalisation, where that is on), P = g z^T and Q = g c^T of a token,

    dz = g + T^T g       dc = K^T g       dT = P + Q W_a^T       dW_a = sum of Q + T^T Q
    dW_1 = sum of (W_2 diag(psi))^T dT    dW_2 = sum of dT W_1^T diag(psi)    dpsi = diag(W_2^T dT W_1^T)

so the fields enter four products and everything else is small matrices of a token. Sums over tokens are kept by each
program in float32, written once, and added up in a fixed order by a second, small kernel: the same numbers every run.

Shapes and the algorithm: triton_field.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .reference import EPSILON
from .triton_field import (
    LANGUAGE_TYPES,
    Sizes,
    add_identity,
    both_parts,
    gated_weight,
    load_chunk,
    load_gates,
    load_weight,
    multiply,
    num_programs,
    row_offsets,
    store_chunk,
    strides_of,
    token_matrices,
    updated_chunk,
)


@triton.jit
def store_weight_gradient(
    pointer,
    gradient,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PADDED_ROWS: tl.constexpr,
    PADDED_COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """The gradient of a weight [ROWS, COLUMNS] or [2, ROWS, COLUMNS] from that of the real matrix load_weight makes of it."""
    if PARTS == 2:
        shape: tl.constexpr = (2, PADDED_ROWS, 2, PADDED_COLUMNS)
        row_part = tl.arange(0, 2 * PADDED_ROWS)[:, None] // PADDED_ROWS
        column_part = tl.arange(0, 2 * PADDED_COLUMNS)[None, :] // PADDED_COLUMNS
        # the imaginary part stands below the diagonal as it is and above it with its sign changed
        off_diagonal = (row_part - column_part).to(tl.float32)
        imaginary = tl.sum(tl.sum(tl.reshape(gradient * off_diagonal, shape), 2), 0)
        store_matrix(pointer + ROWS * COLUMNS, imaginary, ROWS, COLUMNS)
        on_diagonal = (row_part == column_part).to(tl.float32)
        gradient = tl.sum(tl.sum(tl.reshape(gradient * on_diagonal, shape), 2), 0)
    store_matrix(pointer, gradient, ROWS, COLUMNS)


@triton.jit
def store_matrix(pointer, matrix, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The first ROWS and COLUMNS of a matrix, contiguous."""
    row = tl.arange(0, matrix.shape[0])[:, None]
    column = tl.arange(0, matrix.shape[1])[None, :]
    tl.store(pointer + row * COLUMNS + column, matrix, mask=(row < ROWS) & (column < COLUMNS))


@triton.jit
def store_gate_gradient(pointer, gradient, token, tokens, GATES: tl.constexpr, PADDED: tl.constexpr, PARTS: tl.constexpr):
    """dpsi [S, J] of a tile of tokens; what complex weights saw twice is added up."""
    total = tl.sum(tl.reshape(gradient, (gradient.shape[0], PARTS, PADDED)), 1)
    index = tl.arange(0, PADDED)[None, :]
    offset = token.to(tl.int64)[:, None] * GATES + index
    exists = (token < tokens)[:, None] & (index < GATES)
    tl.store(pointer + offset, total.to(pointer.dtype.element_ty), mask=exists)


@triton.jit
def gradient_kernel(
    field_gradient,
    carried_gradient,
    gate_gradient,
    partial_gradients,
    gradient,
    field,
    carried,
    gate,
    carry,
    mix_in,
    mix_out,
    tokens,
    num_tiles,
    field_gradient_batch,
    field_gradient_head,
    field_gradient_token,
    field_gradient_channel,
    carried_gradient_batch,
    carried_gradient_head,
    carried_gradient_token,
    carried_gradient_channel,
    gradient_batch,
    gradient_head,
    gradient_token,
    gradient_channel,
    field_batch,
    field_head,
    field_token,
    field_channel,
    carried_batch,
    carried_head,
    carried_token,
    carried_channel,
    gate_batch,
    gate_token,
    gate_channel,
    PARTS: tl.constexpr,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    GATES: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    PADDED_GATES: tl.constexpr,
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
    """Gradients of the fields and gates, and each program's part of the gradients of the weights, in one row each."""
    R: tl.constexpr = PARTS * PADDED_GROUPS
    C: tl.constexpr = PARTS * PADDED_HEADS
    J: tl.constexpr = PARTS * PADDED_GATES
    weight_carry, weight_in, weight_out = 0.0, 0.0, 0.0
    if HAS_CARRY:
        weight_carry = load_weight(carry, GROUPS, HEADS, PADDED_GROUPS, PADDED_HEADS, PARTS)
        # summed over the S tokens of a tile only at the end: tokens live in different warps
        carry_gradient = tl.zeros((S, R, C), tl.float32)
        carry_gradient_mixed = tl.zeros((R, C), tl.float32)
    if HAS_MIX:
        weight_in = load_weight(mix_in, GATES, GROUPS, PADDED_GATES, PADDED_GROUPS, PARTS)
        weight_out = load_weight(mix_out, GROUPS, GATES, PADDED_GROUPS, PADDED_GATES, PARTS)
        in_gradient = tl.zeros((J, R), tl.float32)
        out_gradient = tl.zeros((S, R, J), tl.float32)
    tiles_per_sequence = tl.cdiv(tokens, S)
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        sequence = (tile // tiles_per_sequence).to(tl.int64)
        token = (tile % tiles_per_sequence) * S + tl.arange(0, S)
        gated = 0.0
        if HAS_MIX:
            gates = load_gates(
                gate + sequence * gate_batch, token, tokens, gate_token, gate_channel, GATES, PADDED_GATES, PARTS
            )
            gated = gated_weight(gates, weight_out, COMPUTE)
        mixing, carrying = token_matrices(gated, weight_in, weight_carry, S, HAS_CARRY, HAS_MIX, COMPUTE)

        field_rows, field_exists = row_offsets(
            token, tokens, field_head, field_token, field_channel, GROUPS, PADDED_GROUPS, DIM, PARTS
        )
        field_rows += sequence * field_batch
        gradient_rows, _ = row_offsets(
            token, tokens, gradient_head, gradient_token, gradient_channel, GROUPS, PADDED_GROUPS, DIM, PARTS
        )
        gradient_rows += sequence * gradient_batch
        if WANTS_FIELD:
            field_gradient_rows, _ = row_offsets(
                token,
                tokens,
                field_gradient_head,
                field_gradient_token,
                field_gradient_channel,
                GROUPS,
                PADDED_GROUPS,
                DIM,
                PARTS,
            )
            field_gradient_rows += sequence * field_gradient_batch
        if HAS_CARRY:
            carried_rows, carried_exists = row_offsets(
                token, tokens, carried_head, carried_token, carried_channel, HEADS, PADDED_HEADS, DIM, PARTS
            )
            carried_rows += sequence * carried_batch
            carried_gradient_rows, _ = row_offsets(
                token,
                tokens,
                carried_gradient_head,
                carried_gradient_token,
                carried_gradient_channel,
                HEADS,
                PADDED_HEADS,
                DIM,
                PARTS,
            )
            carried_gradient_rows += sequence * carried_gradient_batch
