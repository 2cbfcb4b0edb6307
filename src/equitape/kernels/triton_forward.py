"""The field update, forward, in one pass: reads the field, the carried field and the gates once and writes the result.

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
    both_parts,
    gated_weight,
    load_chunk,
    load_gates,
    load_weight,
    num_programs,
    row_offsets,
    store_chunk,
    token_matrices,
    updated_chunk,
)

PROGRAMS_PER_PROCESSOR = 4


@triton.jit
def update_kernel(
    updated,
    field,
    carried,
    gate,
    carry,
    mix_in,
    mix_out,
    tokens,
    num_tiles,
    updated_batch,
    updated_head,
    updated_token,
    updated_channel,
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
    COMPUTE: tl.constexpr,
):
    """z'' = z + T z + K c of every token, divided by its root mean square if NORMALIZE."""
    weight_carry, weight_in, weight_out = 0.0, 0.0, 0.0
    if HAS_CARRY:
        weight_carry = load_weight(carry, GROUPS, HEADS, PADDED_GROUPS, PADDED_HEADS, PARTS)
    if HAS_MIX:
        weight_in = load_weight(mix_in, GATES, GROUPS, PADDED_GATES, PADDED_GROUPS, PARTS)
        weight_out = load_weight(mix_out, GROUPS, GATES, PADDED_GROUPS, PADDED_GATES, PARTS)
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
        from_field, field_exists = row_offsets(
            token, tokens, field_head, field_token, field_channel, GROUPS, PADDED_GROUPS, DIM, PARTS
        )
        into_updated, _ = row_offsets(
            token, tokens, updated_head, updated_token, updated_channel, GROUPS, PADDED_GROUPS, DIM, PARTS
        )
        from_field += sequence * field_batch
        into_updated += sequence * updated_batch
        if HAS_CARRY:
            from_carried, carried_exists = row_offsets(
                token, tokens, carried_head, carried_token, carried_channel, HEADS, PADDED_HEADS, DIM, PARTS
            )
            from_carried += sequence * carried_batch

        scale = 1.0
        if NORMALIZE:
            square = tl.zeros((S, PARTS * PADDED_GROUPS), tl.float32)
            for start in tl.static_range(0, DIM, E):
                old = load_chunk(field, from_field, field_exists, start, field_channel, DIM, E)
                arrived = 0.0
                if HAS_CARRY:
                    arrived = load_chunk(carried, from_carried, carried_exists, start, carried_channel, DIM, E)
                new = updated_chunk(old, arrived, mixing, carrying, HAS_CARRY, HAS_MIX, EXACT, COMPUTE)
                square += tl.sum(new * new, 2)
            scale = tl.rsqrt(both_parts(square, PARTS) * (2.0 / (PARTS * DIM)) + EPSILON)[:, :, None]
        for start in tl.static_range(0, DIM, E):
            old = load_chunk(field, from_field, field_exists, start, field_channel, DIM, E)
            arrived = 0.0
            if HAS_CARRY:
                arrived = load_chunk(carried, from_carried, carried_exists, start, carried_channel, DIM, E)
            new = updated_chunk(old, arrived, mixing, carrying, HAS_CARRY, HAS_MIX, EXACT, COMPUTE)
            store_chunk(updated, into_updated, field_exists, start, updated_channel, new * scale, DIM, E)


def forward(
    field: Tensor,
    carried: Tensor | None,
    gate: Tensor | None,
    carry: Tensor | None,
    mix_in: Tensor | None,
    mix_out: Tensor | None,
    normalize: bool,
) -> Tensor:
    """z'' [B, G, N, D]; arguments as in reference.py, with the batch axis of the field expanded."""
    sizes = Sizes.of(field, carried, gate, carry, mix_in)
    compute = sizes.compute
    updated = torch.empty(field.shape, dtype=torch.promote_types(field.dtype, compute), device=field.device)
    tile, chunk = sizes.tile, sizes.chunk(compute)
    num_tiles = sizes.num_tiles(tile)
    ...
