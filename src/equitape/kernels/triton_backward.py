"""Backward of the field update in one pass over the fields, using only the inputs of forward.

With g the gradient of z'' (before normalisation, if enabled), P = g z^T and Q = g c^T of a token,

    dz = g + T^T g      dc = K^T g      dT = P + Q W_a^T      dW_a = sum of Q + T^T Q
    dW_1 = sum of (W_2 diag(psi))^T dT      dW_2 = sum of dT W_1^T diag(psi)
    dgate = diag(W_2^T dT W_1^T) silu'(gate)

so the fields enter four products; the rest are small matrices of a token. Each program keeps its sums over tokens in
float32 and writes them once; a small second kernel adds them in a fixed order, so results are deterministic.

With complex weights and few frequencies, another kernel computes the same (triton_in_turn.py). Shapes and the
algorithm: triton_field.py.
"""

# mypy: allow-untyped-defs, no-check-untyped-defs

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import triton_in_turn as in_turn
from .launch import Launch, launch
from .triton_field import (
    Update,
    add_identity,
    both_parts,
    by_head,
    by_token,
    contiguous,
    dense,
    gated_weight,
    inverse_rms,
    load_chunk,
    load_gates,
    load_weight,
    multiply,
    num_programs,
    num_tiles,
    rounded,
    rows_of,
    silu,
    silu_slope,
    store_chunk,
    store_weight_gradient,
    strides,
    token_matrices,
    updated_chunk,
)

CHUNK = 512
PROGRAMS_PER_PROCESSOR = 2
# rows of all programs at once and few columns each, for enough programs to sum them
SUM_ROWS, SUM_COLUMNS = 512, 8


@triton.jit
def store_gate_gradient(
    pointer, gradient, sequence, token, tokens, GATES: tl.constexpr, PADDED: tl.constexpr, PARTS: tl.constexpr
):
    """Store the gradient [S, J] of a tile's gates, contiguous; the two copies of complex weights are summed."""
    if PARTS == 2:
        gradient = tl.sum(tl.reshape(gradient, (gradient.shape[0], 2, PADDED)), 1)
    index = tl.arange(0, PADDED)[None, :]
    place = (sequence * tokens + token)[:, None] * GATES + index
    exists = (token < tokens)[:, None] & (index < GATES)
    tl.store(pointer + place, rounded(gradient, pointer.dtype.element_ty), mask=exists)


@triton.jit
def gradient_kernel(
    grad_field,
    attended_gradient,
    gate_gradient,
    partial_sums,
    gradient,
    field,
    attended,
    gate,
    carry,
    mix_in,
    mix_out,
    gradient_by_sequence,
    gradient_by_head,
    gradient_by_token,
    field_by_sequence,
    field_by_head,
    field_by_token,
    attended_by_sequence,
    attended_by_head,
    attended_by_token,
    gate_by_sequence,
    gate_by_token,
    tokens,
    num_tiles,
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
    """Gradients of the fields and gates; each row of partial_sums has one program's part of those of the weights.

    Outputs are contiguous, except the gradient of the attended field, where the heads of a token are adjacent.
    """
    R: tl.constexpr = PARTS * PADDED_GROUPS
    C: tl.constexpr = PARTS * PADDED_HEADS
    J: tl.constexpr = PARTS * PADDED_GATES
    weight_carry, weight_in = 0.0, 0.0
    # the tokens of a tile belong to different warps, so terms without products are summed over them only at the end
    carry_sum = tl.zeros((S, R, C), tl.float32)
    mixed_carry_sum = tl.zeros((R, C), tl.float32)
    in_sum = tl.zeros((J, R), tl.float32)
    out_sum = tl.zeros((S, R, J), tl.float32)
    if HAS_CARRY:
        weight_carry = load_weight(carry, GROUPS, HEADS, PADDED_GROUPS, PADDED_HEADS, PARTS)
    if HAS_MIX:
        weight_in = load_weight(mix_in, GATES, GROUPS, PADDED_GATES, PADDED_GROUPS, PARTS)
        weight_out = load_weight(mix_out, GROUPS, GATES, PADDED_GROUPS, PADDED_GATES, PARTS)
    gradient_strides = (gradient_by_sequence, gradient_by_head, gradient_by_token)
    field_strides = (field_by_sequence, field_by_head, field_by_token)
    attended_strides = (attended_by_sequence, attended_by_head, attended_by_token)
    gate_strides = (gate_by_sequence, gate_by_token)
    grad_field_strides = by_head(tokens, GROUPS, PARTS * DIM)
    attended_gradient_strides = by_token(tokens, HEADS, PARTS * DIM)
    tiles_per_sequence = tl.cdiv(tokens, S)
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        sequence = (tile // tiles_per_sequence).to(tl.int64)
        token = (tile % tiles_per_sequence) * S + tl.arange(0, S)
        gated = 0.0
        if HAS_MIX:
            gates = load_gates(gate, gate_strides, sequence, token, tokens, GATES, PADDED_GATES, PARTS)
            psi = silu(gates)
            gated = gated_weight(psi, weight_out, COMPUTE)
        mixing, carrying = token_matrices(gated, weight_in, weight_carry, S, HAS_CARRY, HAS_MIX, COMPUTE)

        rows, exists = rows_of(field_strides, sequence, token, tokens, GROUPS, PADDED_GROUPS, DIM, PARTS)
        from_rows, _ = rows_of(gradient_strides, sequence, token, tokens, GROUPS, PADDED_GROUPS, DIM, PARTS)
        attended_rows, arrived = rows_of(attended_strides, sequence, token, tokens, HEADS, PADDED_HEADS, DIM, PARTS)
        if NORMALIZE:
            squares = tl.zeros((S, R), tl.float32)
            radial = tl.zeros((S, R), tl.float32)
            for start in tl.static_range(0, DIM, E):
                z = load_chunk(field, rows, exists, start, DIM, E)
                c = 0.0
                if HAS_CARRY:
                    c = load_chunk(attended, attended_rows, arrived, start, DIM, E)
                new = updated_chunk(z, c, mixing, carrying, HAS_CARRY, HAS_MIX, EXACT, COMPUTE)
                g = load_chunk(gradient, from_rows, exists, start, DIM, E)
                squares += tl.sum(new * new, 2)
                radial += tl.sum(new * g.to(tl.float32), 2)
            scale = inverse_rms(squares, DIM, PARTS, EPSILON)
            radial = both_parts(radial, PARTS) * (2.0 / (PARTS * DIM)) * scale * scale * scale

        by_field = tl.zeros((S, R, R), tl.float32)
        by_attended = tl.zeros((S, R, C), tl.float32)
        for start in tl.static_range(0, DIM, E):
            z = load_chunk(field, rows, exists, start, DIM, E)
            c = 0.0
            if HAS_CARRY:
                c = load_chunk(attended, attended_rows, arrived, start, DIM, E)
            g = load_chunk(gradient, from_rows, exists, start, DIM, E)
            if NORMALIZE:
                new = updated_chunk(z, c, mixing, carrying, HAS_CARRY, HAS_MIX, EXACT, COMPUTE)
                g = g.to(tl.float32) * scale[:, :, None] - new * radial[:, :, None]
            if HAS_MIX:
                by_field += multiply(g, tl.permute(z, (0, 2, 1)), COMPUTE)
            if HAS_CARRY:
                by_attended += multiply(g, tl.permute(c, (0, 2, 1)), COMPUTE)
                to_rows, _ = rows_of(
                    attended_gradient_strides, sequence, token, tokens, HEADS, PADDED_HEADS, DIM, PARTS
                )
                dc = multiply(tl.permute(carrying, (0, 2, 1)), g, COMPUTE)
                store_chunk(attended_gradient, to_rows, arrived, start, dc, DIM, E)
            if WANTS_FIELD:
                to_rows, _ = rows_of(grad_field_strides, sequence, token, tokens, GROUPS, PADDED_GROUPS, DIM, PARTS)
                if HAS_MIX:
                    dz = multiply(tl.permute(mixing, (0, 2, 1)), g, COMPUTE)
                    dz = add_identity(dz, g, EXACT_GRADIENT, COMPUTE)
                else:
                    dz = g
                store_chunk(grad_field, to_rows, exists, start, dz, DIM, E)

        if HAS_CARRY:
            carry_sum += by_attended
        if HAS_MIX:
            # dT of all tokens stacked, [S x R, R]
            dt = tl.reshape(by_field, (S * R, R))
            if HAS_CARRY:
                flat = tl.reshape(by_attended, (S * R, C))
                dt += multiply(flat, tl.trans(weight_carry), COMPUTE)
                mixed_carry_sum += multiply(tl.trans(tl.reshape(mixing, (S * R, R))), flat, COMPUTE)
            in_sum += multiply(tl.trans(gated), dt, COMPUTE)
            # dT W_1^T of every token, [S, R, J]
            back = tl.reshape(multiply(dt, tl.trans(weight_in), COMPUTE), (S, R, J))
            out_sum += back * psi[:, None, :]
            dgate = tl.sum(back * weight_out[None, :, :], 1) * silu_slope(gates)
            store_gate_gradient(gate_gradient, dgate, sequence, token, tokens, GATES, PADDED_GATES, PARTS)

    CARRY_SIZE: tl.constexpr = PARTS * GROUPS * HEADS * HAS_CARRY
    MIX_SIZE: tl.constexpr = PARTS * GROUPS * GATES * HAS_MIX
    partial_sums += tl.program_id(0) * (CARRY_SIZE + 2 * MIX_SIZE)
    if HAS_CARRY:
        total = tl.sum(carry_sum, 0) + mixed_carry_sum
        store_weight_gradient(partial_sums, total, GROUPS, HEADS, PADDED_GROUPS, PADDED_HEADS, PARTS)
    if HAS_MIX:
        partial_sums += CARRY_SIZE
        store_weight_gradient(partial_sums, in_sum, GATES, GROUPS, PADDED_GATES, PADDED_GROUPS, PARTS)
        partial_sums += MIX_SIZE
        total = tl.sum(out_sum, 0)
        store_weight_gradient(partial_sums, total, GROUPS, GATES, PADDED_GROUPS, PADDED_GATES, PARTS)


@triton.jit
def sum_kernel(
    carry_gradient,
    in_gradient,
    out_gradient,
    partial_sums,
    num_rows,
    CARRY_SIZE: tl.constexpr,
    MIX_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Add up the rows of partial_sums into the gradients of the three weights."""
    SIZE: tl.constexpr = CARRY_SIZE + 2 * MIX_SIZE
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in tl.range(0, num_rows, ROWS):
        row = (start + tl.arange(0, ROWS))[:, None]
        sums += tl.load(partial_sums + row * SIZE + column, mask=(row < num_rows) & (column < SIZE), other=0.0)
    total = tl.sum(sums, 0)
    if CARRY_SIZE > 0:
        value = rounded(total, carry_gradient.dtype.element_ty)
        tl.store(carry_gradient + column, value, mask=column < CARRY_SIZE)
    if MIX_SIZE > 0:
        column -= CARRY_SIZE
        value = rounded(total, in_gradient.dtype.element_ty)
        tl.store(in_gradient + column, value, mask=(column >= 0) & (column < MIX_SIZE))
        column -= MIX_SIZE
        value = rounded(total, out_gradient.dtype.element_ty)
        tl.store(out_gradient + column, value, mask=(column >= 0) & (column < MIX_SIZE))


def backward(
    gradients: Sequence[Tensor],
    gradient: Tensor,
    field: Tensor,
    attended: Tensor | None,
    gate: Tensor | None,
    carry: Tensor | None,
    mix_in: Tensor | None,
    mix_out: Tensor | None,
    normalize: bool,
    wants_field: bool,
) -> None:
    """Write the gradients of the six tensors, contiguous except that of the attended field: heads of a token adjacent.

    Gradients of tensors not given, and of the field unless wants_field, are not written.
    """
    grad_field, attended_gradient, gate_gradient, *weight_gradients = gradients
    carry_size = carry.numel() if carry is not None else 0
    mix_size = mix_in.numel() if mix_in is not None else 0
    size = carry_size + 2 * mix_size
    gradient, field, attended, gate = dense(gradient), dense(field), dense(attended), dense(gate)
    turns = in_turn.serves(carry, mix_in)
    if turns:
        tiles = in_turn.num_tiles(field, in_turn.BACKWARD_COLUMNS)
        programs = num_programs(field.device, tiles, in_turn.BACKWARD_PROGRAMS)
    else:
        tiles = num_tiles(field)
        programs = num_programs(field.device, tiles, PROGRAMS_PER_PROCESSOR)
    partial_sums = torch.empty(programs, size, dtype=torch.float32, device=field.device)
    written = (grad_field, attended_gradient, gate_gradient, partial_sums)
    read = (gradient, field, attended, gate, contiguous(carry), contiguous(mix_in), contiguous(mix_out))

    def describe() -> Launch:
        update = Update.of(field, attended, gate, carry, mix_in, normalize)
        read_strides = (*strides(gradient, 4), *strides(field, 4), *strides(attended, 4), *strides(gate, 3))
        if turns:
            constants = in_turn.constants(update, field, in_turn.BACKWARD_COLUMNS)
        else:
            constants = update.constants(CHUNK, num_fields=2, device=field.device)
            constants["EXACT"] = update.exact(field)
            constants["EXACT_GRADIENT"] = update.exact(gradient) and not normalize
        constants["WANTS_FIELD"] = wants_field
        return Launch(grid=(programs,), numbers=(*read_strides, update.tokens, tiles), constants=constants)

    kernel = in_turn.in_turn_gradient_kernel if turns else gradient_kernel
    launch(kernel, (*written, *read), (normalize, wants_field), describe)

    def sum_launch() -> Launch:
        sizes = {"CARRY_SIZE": carry_size, "MIX_SIZE": mix_size, "ROWS": SUM_ROWS, "COLUMNS": SUM_COLUMNS}
        return Launch((triton.cdiv(size, SUM_COLUMNS),), (programs,), sizes)

    launch(sum_kernel, (*weight_gradients, partial_sums), (carry_size, mix_size), sum_launch)
