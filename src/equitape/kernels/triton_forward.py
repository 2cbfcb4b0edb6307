"""Forward of the field update in one pass: reads the field, the attended field and the gates once, writes the result.

For a single token, as in decoding, it also computes the gates from the features: a separate product would take as long
as the rest. Shapes and the algorithm: triton_field.py.
"""

# mypy: allow-untyped-defs, no-check-untyped-defs

import triton
import triton.language as tl
from torch import Tensor

from . import triton_in_turn as in_turn
from .launch import Launch, launch
from .triton_field import (
    Update,
    by_head,
    contiguous,
    dense,
    gated_weight,
    inverse_rms,
    load_chunk,
    load_gates,
    load_weight,
    num_programs,
    num_tiles,
    rows_of,
    silu,
    store_chunk,
    strides,
    token_matrices,
    updated_chunk,
)

CHUNK = 1024
PROGRAMS_PER_PROCESSOR = 4
# for a single token: more warps to load the gate weight, in tiles of this many elements
TOKEN_WARPS = 8
WEIGHT_TILE = 16384


@triton.jit
def compute_gates(
    features,
    weight,
    by_sequence,
    sequence,
    WIDTH: tl.constexpr,
    K: tl.constexpr,
    GATES: tl.constexpr,
    PADDED: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Gates [1, J] in float32 of the only token of a sequence: features times a contiguous weight [GATES, WIDTH]."""
    index = (tl.arange(0, PARTS * PADDED) % PADDED)[:, None]
    products = tl.zeros((PARTS * PADDED, K), tl.float32)
    # not a loop, so that all loads of the weight are in flight at once
    for start in tl.static_range(0, WIDTH, K):
        column = start + tl.arange(0, K)[None, :]
        x = tl.load(features + sequence * by_sequence + column, mask=column < WIDTH, other=0.0)
        w = tl.load(weight + index * WIDTH + column, mask=(index < GATES) & (column < WIDTH), other=0.0)
        products += w.to(tl.float32) * x.to(tl.float32)
    return tl.sum(products, 1)[None, :]


@triton.jit
def update_kernel(
    updated,
    field,
    attended,
    gate,
    carry,
    mix_in,
    mix_out,
    gate_weight,
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
    COMPUTE: tl.constexpr,
    WIDTH: tl.constexpr,
    K: tl.constexpr,
):
    """z'' = z + T z + K c of every token, divided by its root mean square if NORMALIZE; updated is contiguous.

    WIDTH: zero, or the number of features of each sequence's only token, given instead of its gates.
    """
    weight_carry, weight_in = 0.0, 0.0
    if HAS_CARRY:
        weight_carry = load_weight(carry, GROUPS, HEADS, PADDED_GROUPS, PADDED_HEADS, PARTS)
    if HAS_MIX:
        weight_in = load_weight(mix_in, GATES, GROUPS, PADDED_GATES, PADDED_GROUPS, PARTS)
        weight_out = load_weight(mix_out, GROUPS, GATES, PADDED_GROUPS, PADDED_GATES, PARTS)
    field_strides = (field_by_sequence, field_by_head, field_by_token)
    attended_strides = (attended_by_sequence, attended_by_head, attended_by_token)
    updated_strides = by_head(tokens, GROUPS, PARTS * DIM)
    tiles_per_sequence = tl.cdiv(tokens, S)
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        sequence = (tile // tiles_per_sequence).to(tl.int64)
        token = (tile % tiles_per_sequence) * S + tl.arange(0, S)
        gated = 0.0
        if HAS_MIX:
            if WIDTH:
                gates = compute_gates(
                    gate, gate_weight, gate_by_sequence, sequence, WIDTH, K, GATES, PADDED_GATES, PARTS
                )
            else:
                gate_strides = (gate_by_sequence, gate_by_token)
                gates = load_gates(gate, gate_strides, sequence, token, tokens, GATES, PADDED_GATES, PARTS)
            gated = gated_weight(silu(gates), weight_out, COMPUTE)
        mixing, carrying = token_matrices(gated, weight_in, weight_carry, S, HAS_CARRY, HAS_MIX, COMPUTE)

        rows, exists = rows_of(field_strides, sequence, token, tokens, GROUPS, PADDED_GROUPS, DIM, PARTS)
        to_rows, _ = rows_of(updated_strides, sequence, token, tokens, GROUPS, PADDED_GROUPS, DIM, PARTS)
        attended_rows, arrived = rows_of(attended_strides, sequence, token, tokens, HEADS, PADDED_HEADS, DIM, PARTS)
        if NORMALIZE:
            squares = tl.zeros((S, PARTS * PADDED_GROUPS), tl.float32)
            for start in tl.static_range(0, DIM, E):
                z = load_chunk(field, rows, exists, start, DIM, E)
                c = 0.0
                if HAS_CARRY:
                    c = load_chunk(attended, attended_rows, arrived, start, DIM, E)
                new = updated_chunk(z, c, mixing, carrying, HAS_CARRY, HAS_MIX, EXACT, COMPUTE)
                squares += tl.sum(new * new, 2)
            scale = inverse_rms(squares, DIM, PARTS, EPSILON)
        for start in tl.static_range(0, DIM, E):
            z = load_chunk(field, rows, exists, start, DIM, E)
            c = 0.0
            if HAS_CARRY:
                c = load_chunk(attended, attended_rows, arrived, start, DIM, E)
            new = updated_chunk(z, c, mixing, carrying, HAS_CARRY, HAS_MIX, EXACT, COMPUTE)
            if NORMALIZE:
                new *= scale[:, :, None]
            store_chunk(updated, to_rows, exists, start, new, DIM, E)


def forward(
    updated: Tensor,
    field: Tensor,
    attended: Tensor | None,
    gate: Tensor | None,
    carry: Tensor | None,
    mix_in: Tensor | None,
    mix_out: Tensor | None,
    normalize: bool,
    gate_weight: Tensor | None = None,
) -> None:
    """Write z'' to updated [B, G, N, D], contiguous. Other arguments as in reference.py, the field with its full batch.

    gate_weight: [I, C] if `gate` holds the features [B, 1, C] of the only token instead of its gates.
    """
    weights = (contiguous(carry), contiguous(mix_in), contiguous(mix_out), contiguous(gate_weight))
    field, attended, gate = dense(field), dense(attended), dense(gate)
    tensors = (updated, field, attended, gate, *weights)
    turns = gate_weight is None and in_turn.serves(carry, mix_in)

    def describe() -> Launch:
        update = Update.of(field, attended, gate, carry, mix_in, normalize)
        read_strides = (*strides(field, 4), *strides(attended, 4), *strides(gate, 3))
        if turns:
            tiles = in_turn.num_tiles(field, in_turn.FORWARD_COLUMNS)
            return Launch(
                grid=(num_programs(field.device, tiles, in_turn.FORWARD_PROGRAMS),),
                numbers=(*read_strides, update.tokens, tiles),
                constants=in_turn.constants(update, field, in_turn.FORWARD_COLUMNS),
            )
        constants = {"EXACT": update.exact(field), **update.constants(CHUNK, num_fields=1, device=field.device)}
        constants |= {"WIDTH": 0, "K": 0}
        if gate_weight is not None:
            width = gate_weight.shape[1]
            tile = WEIGHT_TILE // (update.parts * constants["PADDED_GATES"])
            constants |= {"WIDTH": width, "K": min(tile, triton.next_power_of_2(width)), "S": 1}
            constants |= {"num_warps": TOKEN_WARPS, "num_stages": 1}
        return Launch(
            grid=(num_programs(field.device, num_tiles(field), PROGRAMS_PER_PROCESSOR),),
            numbers=(*read_strides, update.tokens, num_tiles(field)),
            constants=constants,
        )

    if turns:
        launch(in_turn.in_turn_kernel, tensors[:-1], normalize, describe)
    else:
        launch(update_kernel, tensors, normalize, describe)


def forward_token(
    updated: Tensor,
    field: Tensor,
    attended: Tensor | None,
    features: Tensor,
    gate_weight: Tensor,
    carry: Tensor | None,
    mix_in: Tensor,
    mix_out: Tensor,
    normalize: bool,
) -> None:
    """`forward` for single-token sequences, with gates from their features."""
    forward(updated, field, attended, features, carry, mix_in, mix_out, normalize, gate_weight)
