"""The field update with complex weights and few frequencies, forward and backward, each in one pass over the fields.

    x = z + W_a c      u = W_1 x      y = x + W_2 diag(psi) u      y / rms(y) if normalize

and, with g the gradient of y and v = psi u,

    dv = W_2^H g      du = psi dv      dz = dx = g + W_1^H du      dc = W_a^H dx
    dW_2 = sum of g v^H      dW_1 = sum of du x^H      dW_a = sum of dx c^H      dpsi = sum of Re(conj(u) dv)

The weights are applied in turn. The mixing matrix of a token, T = W_2 diag(psi) W_1, would take as many operations to
form as these, and a product of its own per token. Here the tokens and frequencies of a tile are the columns of one
product; no column reads another. Complex weights are real ones of twice the rows: triton_field.py.

Shapes: T tokens of a tile, M frequencies (padded to a power of two), R rows of a field (2 x padded G), C of the
attended field (2 x padded H), J gates (2 x padded I), X = T M columns.
"""

# mypy: allow-untyped-defs, no-check-untyped-defs

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_field import (
    Update,
    by_head,
    by_token,
    load_weight,
    multiply,
    rounded,
    silu,
    silu_slope,
    store_weight_gradient,
)

FORWARD_COLUMNS, BACKWARD_COLUMNS = 64, 64
WARPS = 8
FORWARD_PROGRAMS, BACKWARD_PROGRAMS = 2, 1
"""Programs per processor, as many as their registers allow."""


@triton.jit
def places(
    strides, sequence, first, tokens, HEADS: tl.constexpr, PADDED: tl.constexpr, M: tl.constexpr,
    PADDED_M: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Offsets [2 x PADDED, X] of a tile in a field, and which of them exist. strides: of sequences, heads, tokens."""
    row, column = tl.arange(0, 2 * PADDED), tl.arange(0, T * PADDED_M)
    part, head = row // PADDED, row % PADDED
    token, frequency = first + column // PADDED_M, column % PADDED_M
    # 64 bits: a long batch of fields has more than 2^31 elements
    within = head.to(tl.int64) * strides[1] + part * M
    begin = sequence * strides[0] + token.to(tl.int64) * strides[2] + frequency
    exists = (head < HEADS)[:, None] & ((token < tokens) & (frequency < M))[None, :]
    return within[:, None] + begin[None, :], exists


@triton.jit
def load_tile_gates(
    gate, strides, sequence, first, tokens, GATES: tl.constexpr, PADDED: tl.constexpr, T: tl.constexpr
):  # fmt: skip
    """Gates [J, T] of a tile in float32, each twice. strides: of sequences and tokens."""
    index = (tl.arange(0, 2 * PADDED) % PADDED)[:, None]
    token = (first + tl.arange(0, T))[None, :]
    at = gate + sequence * strides[0] + token.to(tl.int64) * strides[1] + index
    return tl.load(at, mask=(index < GATES) & (token < tokens), other=0.0).to(tl.float32)


@triton.jit
def per_token(x, factor, T: tl.constexpr, PADDED_M: tl.constexpr):
    """x [rows, X] times a number of every row and token, [rows, T]."""
    rows: tl.constexpr = x.shape[0]
    product = tl.reshape(x, (rows, T, PADDED_M)) * factor[:, :, None]
    return tl.reshape(product, (rows, T * PADDED_M))


@triton.jit
def over_frequencies(x, T: tl.constexpr, PADDED_M: tl.constexpr):
    """Sums of [rows, X] over the frequencies of a token, [rows, T]."""
    return tl.sum(tl.reshape(x, (x.shape[0], T, PADDED_M)), 2)


@triton.jit
def both_rows(sums):
    """Sums [R, T] of real and imaginary rows, added and assigned to both."""
    half: tl.constexpr = sums.shape[0] // 2
    total = tl.sum(tl.reshape(sums, (2, half, sums.shape[1])), 0)
    return tl.reshape(tl.broadcast_to(total[None, :, :], (2, half, sums.shape[1])), (2 * half, sums.shape[1]))


@triton.jit
def in_turn_kernel(
    updated,
    field,
    attended,
    gate,
    carry,
    mix_in,
    mix_out,
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
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    GATES: tl.constexpr,
    M: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    PADDED_GATES: tl.constexpr,
    PADDED_M: tl.constexpr,
    T: tl.constexpr,
    HAS_CARRY: tl.constexpr,
    HAS_MIX: tl.constexpr,
    NORMALIZE: tl.constexpr,
    EPSILON: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """y of every token, divided by its root mean square if NORMALIZE; updated is contiguous."""
    if HAS_CARRY:
        weight_carry = load_weight(carry, GROUPS, HEADS, PADDED_GROUPS, PADDED_HEADS, 2)
    if HAS_MIX:
        weight_in = load_weight(mix_in, GATES, GROUPS, PADDED_GATES, PADDED_GROUPS, 2)
        weight_out = load_weight(mix_out, GROUPS, GATES, PADDED_GROUPS, PADDED_GATES, 2)
    field_strides = (field_by_sequence, field_by_head, field_by_token)
    attended_strides = (attended_by_sequence, attended_by_head, attended_by_token)
    updated_strides = by_head(tokens, GROUPS, 2 * M)
    tiles_per_sequence = tl.cdiv(tokens, T)
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        sequence = (tile // tiles_per_sequence).to(tl.int64)
        first = (tile % tiles_per_sequence) * T
        at, exists = places(field_strides, sequence, first, tokens, GROUPS, PADDED_GROUPS, M, PADDED_M, T)
        y = tl.load(field + at, mask=exists, other=0.0).to(tl.float32)
        if HAS_CARRY:
            from_at, arrived = places(attended_strides, sequence, first, tokens, HEADS, PADDED_HEADS, M, PADDED_M, T)
            y += multiply(weight_carry, tl.load(attended + from_at, mask=arrived, other=0.0), COMPUTE)
        if HAS_MIX:
            gates = load_tile_gates(
                gate, (gate_by_sequence, gate_by_token), sequence, first, tokens, GATES, PADDED_GATES, T
            )
            v = per_token(multiply(weight_in, y, COMPUTE), silu(gates), T, PADDED_M)
            y += multiply(weight_out, v, COMPUTE)
        if NORMALIZE:
            squares = both_rows(over_frequencies(y * y, T, PADDED_M))
            y = per_token(y, tl.rsqrt(squares * (1.0 / M) + EPSILON), T, PADDED_M)
        to, _ = places(updated_strides, sequence, first, tokens, GROUPS, PADDED_GROUPS, M, PADDED_M, T)
        tl.store(updated + to, rounded(y, updated.dtype.element_ty), mask=exists)


@triton.jit
def in_turn_gradient_kernel(
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
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    GATES: tl.constexpr,
    M: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    PADDED_GATES: tl.constexpr,
    PADDED_M: tl.constexpr,
    T: tl.constexpr,
    HAS_CARRY: tl.constexpr,
    HAS_MIX: tl.constexpr,
    NORMALIZE: tl.constexpr,
    EPSILON: tl.constexpr,
    COMPUTE: tl.constexpr,
    WANTS_FIELD: tl.constexpr,
):
    """Gradients of the fields and gates; each row of partial_sums has one program's part of those of the weights.

    Outputs are contiguous, except the gradient of the attended field, where the heads of a token are adjacent.
    """
    R: tl.constexpr = 2 * PADDED_GROUPS
    C: tl.constexpr = 2 * PADDED_HEADS
    J: tl.constexpr = 2 * PADDED_GATES
    if HAS_CARRY:
        weight_carry = load_weight(carry, GROUPS, HEADS, PADDED_GROUPS, PADDED_HEADS, 2)
        carry_sum = tl.zeros((R, C), tl.float32)
    if HAS_MIX:
        weight_in = load_weight(mix_in, GATES, GROUPS, PADDED_GATES, PADDED_GROUPS, 2)
        weight_out = load_weight(mix_out, GROUPS, GATES, PADDED_GROUPS, PADDED_GATES, 2)
        in_sum = tl.zeros((J, R), tl.float32)
        out_sum = tl.zeros((R, J), tl.float32)
    gradient_strides = (gradient_by_sequence, gradient_by_head, gradient_by_token)
    field_strides = (field_by_sequence, field_by_head, field_by_token)
    attended_strides = (attended_by_sequence, attended_by_head, attended_by_token)
    grad_field_strides = by_head(tokens, GROUPS, 2 * M)
    attended_gradient_strides = by_token(tokens, HEADS, 2 * M)
    tiles_per_sequence = tl.cdiv(tokens, T)
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        sequence = (tile // tiles_per_sequence).to(tl.int64)
        first = (tile % tiles_per_sequence) * T
        at, exists = places(field_strides, sequence, first, tokens, GROUPS, PADDED_GROUPS, M, PADDED_M, T)
        x = tl.load(field + at, mask=exists, other=0.0).to(tl.float32)
        at, _ = places(gradient_strides, sequence, first, tokens, GROUPS, PADDED_GROUPS, M, PADDED_M, T)
        g = tl.load(gradient + at, mask=exists, other=0.0).to(tl.float32)
        if HAS_CARRY:
            at, arrived = places(attended_strides, sequence, first, tokens, HEADS, PADDED_HEADS, M, PADDED_M, T)
            c = tl.load(attended + at, mask=arrived, other=0.0)
            x += multiply(weight_carry, c, COMPUTE)
        if HAS_MIX:
            gates = load_tile_gates(
                gate, (gate_by_sequence, gate_by_token), sequence, first, tokens, GATES, PADDED_GATES, T
            )
            psi = silu(gates)
            u = multiply(weight_in, x, COMPUTE)
            v = per_token(u, psi, T, PADDED_M)
        if NORMALIZE:
            y = x
            if HAS_MIX:
                y += multiply(weight_out, v, COMPUTE)
            scale = tl.rsqrt(both_rows(over_frequencies(y * y, T, PADDED_M)) * (1.0 / M) + EPSILON)
            radial = both_rows(over_frequencies(y * g, T, PADDED_M)) * (1.0 / M) * scale * scale * scale
            g = per_token(g, scale, T, PADDED_M) - per_token(y, radial, T, PADDED_M)
        if HAS_MIX:
            out_sum += multiply(g, tl.trans(v), COMPUTE)
            dv = multiply(tl.trans(weight_out), g, COMPUTE)
            dgate = over_frequencies(u * dv, T, PADDED_M) * silu_slope(gates)
            dgate = tl.sum(tl.reshape(dgate, (2, PADDED_GATES, T)), 0)
            index, token = tl.arange(0, PADDED_GATES)[:, None], (first + tl.arange(0, T))[None, :]
            to = (sequence * tokens + token) * GATES + index
            dgate = rounded(dgate, gate_gradient.dtype.element_ty)
            tl.store(gate_gradient + to, dgate, mask=(index < GATES) & (token < tokens))
            du = per_token(dv, psi, T, PADDED_M)
            in_sum += multiply(du, tl.trans(x), COMPUTE)
            g += multiply(tl.trans(weight_in), du, COMPUTE)
        if WANTS_FIELD:
            to, _ = places(grad_field_strides, sequence, first, tokens, GROUPS, PADDED_GROUPS, M, PADDED_M, T)
            tl.store(grad_field + to, rounded(g, grad_field.dtype.element_ty), mask=exists)
        if HAS_CARRY:
            carry_sum += multiply(g, tl.trans(c), COMPUTE)
            dc = multiply(tl.trans(weight_carry), g, COMPUTE)
            to, _ = places(attended_gradient_strides, sequence, first, tokens, HEADS, PADDED_HEADS, M, PADDED_M, T)
            tl.store(attended_gradient + to, rounded(dc, attended_gradient.dtype.element_ty), mask=arrived)

    CARRY_SIZE: tl.constexpr = 2 * GROUPS * HEADS * HAS_CARRY
    MIX_SIZE: tl.constexpr = 2 * GROUPS * GATES * HAS_MIX
    partial_sums += tl.program_id(0) * (CARRY_SIZE + 2 * MIX_SIZE)
    if HAS_CARRY:
        store_weight_gradient(partial_sums, carry_sum, GROUPS, HEADS, PADDED_GROUPS, PADDED_HEADS, 2)
    if HAS_MIX:
        partial_sums += CARRY_SIZE
        store_weight_gradient(partial_sums, in_sum, GATES, GROUPS, PADDED_GATES, PADDED_GROUPS, 2)
        store_weight_gradient(partial_sums + MIX_SIZE, out_sum, GROUPS, GATES, PADDED_GROUPS, PADDED_GATES, 2)


def serves(carry: Tensor | None, mix_in: Tensor | None) -> bool:
    """Whether these kernels are for this update: it has complex weights."""
    weight = carry if carry is not None else mix_in
    return weight is not None and weight.dim() == 3


def num_tiles(field: Tensor, columns: int) -> int:
    """A tile has tokens of one sequence."""
    return field.shape[0] * triton.cdiv(field.shape[2], _tokens(field, columns))


def _tokens(field: Tensor, columns: int) -> int:
    return max(1, columns // triton.next_power_of_2(field.shape[3] // 2))


def constants(update: Update, field: Tensor, columns: int) -> dict[str, Any]:
    """Compile-time constants of the kernels."""
    kept = ("GROUPS", "HEADS", "GATES", "PADDED_GROUPS", "PADDED_HEADS", "PADDED_GATES", "HAS_CARRY", "HAS_MIX")
    found = update.constants(columns, num_fields=1, device=torch.device("cpu"))
    return {
        **{name: found[name] for name in (*kept, "NORMALIZE", "EPSILON", "COMPUTE")},
        "M": update.dim,
        "PADDED_M": triton.next_power_of_2(update.dim),
        "T": _tokens(field, columns),
        "num_warps": WARPS,
        "num_stages": 2,
    }
