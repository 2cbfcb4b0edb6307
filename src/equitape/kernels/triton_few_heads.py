"""Backward of the field update for few heads, without matrix units, which would be mostly empty.

With g the gradient of z'', the gradients of triton_backward.py are computed here in this order:

    dz = g + T^T g      dc = W_a^T dz      dW_a = sum of dz c^T      z' = z + W_a c      dT = g z'^T

Only T and dT, [G, G], are sums within a token that its threads exchange: T for dz, and dT for the gates and their
weights. A token's channels are on L threads of one warp, VECTOR adjacent ones each, with all heads of a channel on the
same thread; its gates are on the same L threads. So warps do not wait for each other, a thread holds a few rows at a
time, and NaN in one token does not spread.

Shapes: S tokens of a tile, E channels of a chunk, L threads of a token. A field is a tuple of its heads, [S, E] each; a
matrix of a token is a tuple of its elements, [S, 1] each, row by row.
"""

# mypy: allow-untyped-defs, no-check-untyped-defs, disable-error-code="assignment,var-annotated"
# (in a kernel, a tuple may grow)

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .triton_field import INTERPRETED, Update, load_chunk, silu, silu_slope, store_chunk

WARP = 32
WARPS = 4
# three programs of four warps fit in a processor's 65536 registers; with fewer registers each, threads spill
REGISTERS = 168
PROGRAMS_PER_PROCESSOR = 3
# channels of a chunk, and bytes of a row that a thread loads at once
CHUNK = 64
THREAD_BYTES = 16
# rows of the attended field prefetched while one is used
AHEAD = 9
# where it was measured to be faster: at 4 x 16 heads, the matrix units win (benchmarks/README.md)
MAX_GROUPS, MAX_WEIGHTS, MAX_GATES = 3, 32, 16


def serves(field: Tensor, carry: Tensor | None, mix_in: Tensor | None, normalize: bool) -> bool:
    """Whether there are few enough heads for a thread's share of all of them to fit in registers.

    The sums of dW_a need GROUPS x HEADS of them, the field and its gradient VECTOR x GROUPS each; complex weights would
    need twice as many, and normalisation another pass.
    """
    few_weights = carry is None or (carry.dim() == 2 and carry.numel() <= MAX_WEIGHTS)
    few_gates = mix_in is None or (mix_in.dim() == 2 and mix_in.shape[0] <= MAX_GATES)
    return field.shape[1] <= MAX_GROUPS and few_weights and few_gates and not normalize


def num_tiles(gradient: Tensor, field: Tensor, attended: Tensor | None) -> int:
    """A tile has as many tokens of one sequence as the threads of a program hold chunks of channels."""
    tokens_of_a_tile, _, _ = _cut(gradient, field, attended)
    return field.shape[0] * triton.cdiv(field.shape[2], tokens_of_a_tile)


def constants(update: Update, gradient: Tensor, field: Tensor, attended: Tensor | None) -> dict[str, Any]:
    """Compile-time constants of the kernel."""
    tokens, channels, vector = _cut(gradient, field, attended)
    chunks_of_gates = triton.cdiv(update.gates, channels // vector)
    return {
        "GROUPS": update.groups,
        "HEADS": update.heads,
        "GATES": update.gates,
        "DIM": update.dim,
        "S": tokens,
        "E": channels,
        "VECTOR": vector,
        "FIRST": min(AHEAD, update.heads),
        "CARRY_SLOTS": triton.next_power_of_2(update.groups * update.heads),
        "MIX_SLOTS": triton.next_power_of_2(update.groups * chunks_of_gates),
        "HAS_CARRY": update.has_carry,
        "HAS_MIX": update.has_mix,
        "num_warps": WARPS,
        "maxnreg": REGISTERS,
    }


def _cut(gradient: Tensor, field: Tensor, attended: Tensor | None) -> tuple[int, int, int]:
    """Tokens per tile, channels per chunk, and channels per thread."""
    itemsize = max(tensor.dtype.itemsize for tensor in (gradient, field, attended) if tensor is not None)
    vector = THREAD_BYTES // itemsize
    channels = min(CHUNK, triton.next_power_of_2(field.shape[3]))
    return WARPS * WARP * vector // channels, channels, vector


@triton.jit
def on_each_thread(products, VECTOR: tl.constexpr):
    """Sums [S, L] of products [S, E] over the channels of a thread."""
    return tl.sum(tl.reshape(products, (products.shape[0], products.shape[1] // VECTOR, VECTOR)), 2)


@triton.jit
def zeros(S: tl.constexpr, L: tl.constexpr, COUNT: tl.constexpr):
    """COUNT tensors [S, L]."""
    values = ()
    for _ in tl.static_range(COUNT):
        values += (tl.zeros((S, L), tl.float32),)
    return values


@triton.jit
def over_threads(values, COUNT: tl.constexpr):
    """Sums [S, 1] of COUNT tensors [S, L]."""
    sums = ()
    for i in tl.static_range(COUNT):
        sums += (tl.sum(values[i], 1)[:, None],)
    return sums


@triton.jit
def formed(value):
    """A float32 tensor, computed before what follows: otherwise the compiler loads and keeps all heads first."""
    if not INTERPRETED:
        value = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [value], tl.float32, is_pure=False, pack=1)
    return value


@triton.jit
def stack(values, COUNT: tl.constexpr, SLOTS: tl.constexpr):
    """COUNT tensors [S, L] as [S, L, SLOTS], zero-padded to a power of two."""
    for _ in tl.static_range(SLOTS - COUNT):
        values += (tl.zeros_like(values[0]),)
    # join halves until one tensor is left
    for level in tl.static_range(6):
        if SLOTS >> level > 1:
            joined = ()
            for i in tl.static_range(SLOTS >> (level + 1)):
                joined += (tl.join(values[i], values[i + (SLOTS >> (level + 1))]),)
            values = joined
    return tl.reshape(values[0], (values[0].shape[0], values[0].shape[1], SLOTS))


@triton.jit
def load_heads(pointer, begin, by_head, exists, start, HEADS: tl.constexpr, DIM: tl.constexpr, E: tl.constexpr):
    """Channels start to start + E of the first HEADS heads of a tile, in their dtype."""
    heads = ()
    for head in tl.static_range(HEADS):
        heads += (load_chunk(pointer, begin + head * tl.cast(by_head, tl.int64), exists, start, DIM, E),)
    return heads


@triton.jit
def load_gate_weight(weight, start, by_gate, GATES: tl.constexpr, L: tl.constexpr):
    """Elements start to start + L of a row or column of a weight, [1, L] in float32."""
    gate = start + tl.arange(0, L)[None, :]
    return tl.load(weight + gate * by_gate, mask=gate < GATES, other=0.0).to(tl.float32)


@triton.jit
def token_mixing(gates, mix_in, mix_out, GROUPS: tl.constexpr, GATES: tl.constexpr, S: tl.constexpr, L: tl.constexpr):
    """T of a tile of tokens."""
    products = zeros(S, L, GROUPS * GROUPS)
    for start in tl.static_range(0, GATES, L):
        psi = silu(gates[start // L].to(tl.float32))
        added = ()
        for row in tl.static_range(GROUPS):
            gated = psi * load_gate_weight(mix_out + row * GATES, start, 1, GATES, L)
            for column in tl.static_range(GROUPS):
                into = load_gate_weight(mix_in + column, start, GROUPS, GATES, L)
                added += (products[row * GROUPS + column] + gated * into,)
        products = added
    return over_threads(products, GROUPS * GROUPS)


@triton.jit
def few_heads_kernel(
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
    DIM: tl.constexpr,
    S: tl.constexpr,
    E: tl.constexpr,
    VECTOR: tl.constexpr,
    FIRST: tl.constexpr,
    CARRY_SLOTS: tl.constexpr,
    MIX_SLOTS: tl.constexpr,
    HAS_CARRY: tl.constexpr,
    HAS_MIX: tl.constexpr,
    WANTS_FIELD: tl.constexpr,
):
    """gradient_kernel of triton_backward.py for few heads, with the same outputs."""
    L: tl.constexpr = E // VECTOR
    CHUNKS_OF_GATES: tl.constexpr = (GATES + L - 1) // L
    carry_sums = zeros(S, L, GROUPS * HEADS)
    in_sum = tl.zeros((S, L, MIX_SLOTS), tl.float32)
    out_sum = tl.zeros((S, L, MIX_SLOTS), tl.float32)
    tiles_per_sequence = tl.cdiv(tokens, S)
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        sequence = (tile // tiles_per_sequence).to(tl.int64)
        token = ((tile % tiles_per_sequence) * S + tl.arange(0, S))[:, None]
        exists = token < tokens
        wide = token.to(tl.int64)
        gates_begin = sequence * gate_by_sequence + wide * gate_by_token
        from_begin = sequence * gradient_by_sequence + wide * gradient_by_token
        begin = sequence * field_by_sequence + wide * field_by_token
        attended_begin = sequence * attended_by_sequence + wide * attended_by_token
        to_attended = (sequence * tokens + wide) * HEADS * DIM
        to_gates = (sequence * tokens + wide) * GATES

        gates = ()
        if HAS_MIX:
            # before the fields: the compiler chooses layouts by what is loaded last
            for start in tl.static_range(0, GATES, L):
                gates += (load_chunk(gate, gates_begin, exists, start, GATES, L),)
        grad_mixing = zeros(S, L, GROUPS * GROUPS)
        for start in tl.static_range(0, DIM, E):
            g = load_heads(gradient, from_begin, gradient_by_head, exists, start, GROUPS, DIM, E)
            if HAS_MIX:
                updated = load_heads(field, begin, field_by_head, exists, start, GROUPS, DIM, E)
            if HAS_CARRY:
                coming = load_heads(attended, attended_begin, attended_by_head, exists, start, FIRST, DIM, E)
            if HAS_MIX and start == 0:
                # while these loads are in flight
                mixing = token_mixing(gates, mix_in, mix_out, GROUPS, GATES, S, L)
            dz = ()
            for column in tl.static_range(GROUPS):
                total = g[column].to(tl.float32)
                if HAS_MIX:
                    for row in tl.static_range(GROUPS):
                        total += mixing[row * GROUPS + column] * g[row].to(tl.float32)
                dz += (total,)
            if WANTS_FIELD:
                for row in tl.static_range(GROUPS):
                    to_rows = ((sequence * GROUPS + row) * tokens + wide) * DIM
                    store_chunk(grad_field, to_rows, exists, start, dz[row], DIM, E)
            if HAS_CARRY:
                sums = ()
                for head in tl.static_range(HEADS):
                    if head + FIRST < HEADS:
                        rows = attended_begin + (head + FIRST) * tl.cast(attended_by_head, tl.int64)
                        coming += (load_chunk(attended, rows, exists, start, DIM, E),)
                    c = coming[head].to(tl.float32)
                    dc = tl.zeros((S, E), tl.float32)
                    attended_on = ()
                    for row in tl.static_range(GROUPS):
                        weight = tl.load(carry + row * HEADS + head).to(tl.float32)
                        dc += weight * dz[row]
                        product = on_each_thread(dz[row] * c, VECTOR)
                        sums += (formed(carry_sums[head * GROUPS + row] + product),)
                        if HAS_MIX:
                            attended_on += (formed(updated[row].to(tl.float32) + weight * c),)
                    if HAS_MIX:
                        updated = attended_on
                    store_chunk(attended_gradient, to_attended + head * DIM, exists, start, dc, DIM, E)
                carry_sums = sums
            if HAS_MIX:
                # load again instead of holding it in registers
                g = load_heads(gradient, from_begin, gradient_by_head, exists, start, GROUPS, DIM, E)
                sums = ()
                for row in tl.static_range(GROUPS):
                    for column in tl.static_range(GROUPS):
                        product = on_each_thread(g[row].to(tl.float32) * updated[column].to(tl.float32), VECTOR)
                        sums += (grad_mixing[row * GROUPS + column] + product,)
                grad_mixing = sums

        if HAS_MIX:
            grad_mixing = over_threads(grad_mixing, GROUPS * GROUPS)
            in_terms = ()
            out_terms = ()
            for start in tl.static_range(0, GATES, L):
                activation = gates[start // L].to(tl.float32)
                psi = silu(activation)
                dpsi = tl.zeros((S, L), tl.float32)
                for row in tl.static_range(GROUPS):
                    # a row of dT W_1^T, and a column of (W_2 diag(psi))^T dT
                    back = tl.zeros((S, L), tl.float32)
                    term = tl.zeros((S, L), tl.float32)
                    for other in tl.static_range(GROUPS):
                        into = load_gate_weight(mix_in + other, start, GROUPS, GATES, L)
                        out = load_gate_weight(mix_out + other * GATES, start, 1, GATES, L)
                        back += grad_mixing[row * GROUPS + other] * into
                        term += grad_mixing[other * GROUPS + row] * out
                    dpsi += back * load_gate_weight(mix_out + row * GATES, start, 1, GATES, L)
                    in_terms += (psi * term,)
                    out_terms += (psi * back,)
                store_chunk(gate_gradient, to_gates, exists, start, dpsi * silu_slope(activation), GATES, L)
            in_sum += stack(in_terms, CHUNKS_OF_GATES * GROUPS, MIX_SLOTS)
            out_sum += stack(out_terms, CHUNKS_OF_GATES * GROUPS, MIX_SLOTS)

    CARRY_SIZE: tl.constexpr = GROUPS * HEADS * HAS_CARRY
    MIX_SIZE: tl.constexpr = GROUPS * GATES * HAS_MIX
    partial_sums += tl.program_id(0) * (CARRY_SIZE + 2 * MIX_SIZE)
    if HAS_CARRY:
        slot = tl.arange(0, CARRY_SLOTS)
        total = stack(carry_sums, HEADS * GROUPS, CARRY_SLOTS)
        total = tl.sum(tl.reshape(total, (S * L, CARRY_SLOTS)), 0)
        tl.store(partial_sums + (slot % GROUPS) * HEADS + slot // GROUPS, total, mask=slot < CARRY_SIZE)
    if HAS_MIX:
        slot = tl.arange(0, MIX_SLOTS)[None, :]
        index = slot // GROUPS * L + tl.arange(0, L)[:, None]
        row = slot % GROUPS
        exists = (index < GATES) & (slot < CHUNKS_OF_GATES * GROUPS)
        partial_sums += CARRY_SIZE
        tl.store(partial_sums + index * GROUPS + row, tl.sum(in_sum, 0), mask=exists)
        tl.store(partial_sums + MIX_SIZE + row * GATES + index, tl.sum(out_sum, 0), mask=exists)
