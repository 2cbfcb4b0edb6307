"""What the forward and the backward kernel of the field update share: sizes, loads, and the matrices of a token.

A token's update is linear in its field z [G, D] and in what attention carried to it, c [H, D]:

    z'' = z + T z + K c,   T = W_2 diag(psi) W_1,   K = W_a + T W_a

so a kernel forms the two small matrices T [G, G] and K [G, H] of each token and applies them to tiles of the fields on
the matrix units, one token an element of a batched product. z' = z + W_a c never exists, neither here nor in backward.

Complex mixing is real mixing of twice the heads: the real and the imaginary halves of a field are rows of their own, and
the weight a + ib is the matrix [[a, -b], [b, a]]. PARTS is 1 for real and 2 for complex weights.

Shapes: S tokens a tile, R rows of a field (PARTS x padded G), C rows of the carried field (PARTS x padded H), J gates
(PARTS x padded I), E channels of a chunk. Heads and gates are padded with zeros to powers of two, and rows to at least
the 16 of a matrix unit.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

# rows of a product on the matrix units
UNIT = 16

LANGUAGE_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@dataclass(frozen=True)
class Sizes:
    """Sizes of one update, and how it is cut into tiles."""

    parts: int
    batch: int
    tokens: int
    groups: int
    heads: int
    gates: int
    dim: int
    """Channels of a part: D, or D / 2 where the weights are complex."""

    @property
    def padded_groups(self) -> int:
        return self._padded(self.groups)

    @property
    def padded_heads(self) -> int:
        return self._padded(self.heads)

    @property
    def padded_gates(self) -> int:
        return self._padded(self.gates)

    def _padded(self, count: int) -> int:
        return max(triton.next_power_of_2(count), UNIT // self.parts)

    def num_tiles(self, tile: int) -> int:
        return self.batch * triton.cdiv(self.tokens, tile)

    def constants(self) -> dict[str, int]:
        """What the kernels know of the sizes when they are compiled."""
        return {
            "PARTS": self.parts,
            "GROUPS": self.groups,
            "HEADS": self.heads,
            "GATES": self.gates,
            "DIM": self.dim,
            "PADDED_GROUPS": self.padded_groups,
            "PADDED_HEADS": self.padded_heads,
            "PADDED_GATES": self.padded_gates,
        }


def sizes_of(field: Tensor, carried: Tensor | None, gate: Tensor | None, parts: int) -> Sizes:
    batch, groups, tokens, dim = field.shape
    heads = carried.shape[1] if carried is not None else 1
    gates = gate.shape[2] if gate is not None else 1
    return Sizes(parts, batch, tokens, groups, heads, gates, dim // parts)


def num_programs(device: torch.device, num_tiles: int, per_processor: int) -> int:
    """Each program walks over many tiles, so that weights are read, and their gradients written, once a program."""
    if device.type == "cuda":
        limit = torch.cuda.get_device_properties(device).multi_processor_count * per_processor
    else:
        # the interpreter: few enough that a program sees several tiles
        limit = 2
    return max(1, min(limit, num_tiles))


@triton.jit
def load_weight(
    weight, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PADDED_ROWS: tl.constexpr, PADDED_COLUMNS: tl.constexpr, PARTS: tl.constexpr
):
    """A contiguous [ROWS, COLUMNS] or [2, ROWS, COLUMNS] as a real matrix over padded rows and columns, in float32."""
    row = tl.arange(0, PARTS * PADDED_ROWS)[:, None]
    column = tl.arange(0, PARTS * PADDED_COLUMNS)[None, :]
    row_part, row = row // PADDED_ROWS, row % PADDED_ROWS
    column_part, column = column // PADDED_COLUMNS, column % PADDED_COLUMNS
    offset = (row_part ^ column_part) * (ROWS * COLUMNS) + row * COLUMNS + column
    value = tl.load(weight + offset, mask=(row < ROWS) & (column < COLUMNS), other=0.0).to(tl.float32)
    return tl.where(row_part < column_part, -value, value)


@triton.jit
def row_offsets(token, tokens, stride_head, stride_token, stride_channel, HEADS: tl.constexpr, PADDED: tl.constexpr, DIM: tl.constexpr, PARTS: tl.constexpr):
    """Where the rows of a tile of tokens begin, and which of them exist: both [S, PARTS x PADDED, 1]."""
    row = tl.arange(0, PARTS * PADDED)
    part, head = row // PADDED, row % PADDED
    within = head.to(tl.int64) * stride_head + part * DIM * stride_channel
    offset = token.to(tl.int64)[:, None] * stride_token + within[None, :]
    exists = (token < tokens)[:, None] & (head < HEADS)[None, :]
    return offset[:, :, None], exists[:, :, None]


@triton.jit
def load_gates(gate, token, tokens, stride_token, stride_gate, GATES: tl.constexpr, PADDED: tl.constexpr, PARTS: tl.constexpr):
    """psi of a tile of tokens, [S, J] in float32; complex weights see every gate twice."""
    index = tl.arange(0, PARTS * PADDED) % PADDED
    offset = token.to(tl.int64)[:, None] * stride_token + index[None, :] * stride_gate
    exists = (token < tokens)[:, None] & (index < GATES)[None, :]
    return tl.load(gate + offset, mask=exists, other=0.0).to(tl.float32)


@triton.jit
def gated_weight(gates, mix_out, COMPUTE: tl.constexpr):
    """W_2 diag(psi) of a tile of tokens, [S x R, J]."""
    gated = (mix_out[None, :, :] * gates[:, None, :]).to(COMPUTE)
    return tl.reshape(gated, (gates.shape[0] * mix_out.shape[0], mix_out.shape[1]))


@triton.jit
def multiply(left, right, COMPUTE: tl.constexpr):
    """A product on the matrix units: operands in the computing dtype, sums in float32. Float32 stays float32."""
    return tl.dot(left.to(COMPUTE), right.to(COMPUTE), input_precision="ieee")


@triton.jit
def add_identity(product, field, EXACT: tl.constexpr, COMPUTE: tl.constexpr):
    """product + field, both [S, R, E]."""
    if EXACT:
        # one times a number is that number in any dtype: the matrix unit adds it from where it already holds the field
        row = tl.arange(0, field.shape[1])
        identity = tl.where(row[:, None] == row[None, :], 1.0, 0.0).to(COMPUTE)
        identity = tl.broadcast_to(identity[None, :, :], (field.shape[0], field.shape[1], field.shape[1]))
        return product + multiply(identity, field, COMPUTE)
    else:
        return product + field.to(tl.float32)


@triton.jit
def both_parts(sums, PARTS: tl.constexpr):
    """Sums [S, R] of the real and of the imaginary part of a head, added up and given to both."""
    if PARTS == 2:
        heads: tl.constexpr = sums.shape[1] // 2
        halves = tl.reshape(sums, (sums.shape[0], 2, heads))
        total = tl.broadcast_to(tl.sum(halves, 1)[:, None, :], (sums.shape[0], 2, heads))
        sums = tl.reshape(total, (sums.shape[0], 2 * heads))
    return sums


@triton.jit
def load_chunk(pointer, rows, exists, start, stride_channel, DIM: tl.constexpr, E: tl.constexpr):
    """Channels start to start + E of the rows of a tile, [S, R, E]; zero where there are none."""
    channel = start + tl.arange(0, E)[None, None, :]
    return tl.load(pointer + rows + channel * stride_channel, mask=exists & (channel < DIM), other=0.0)


@triton.jit
def store_chunk(pointer, rows, exists, start, stride_channel, value, DIM: tl.constexpr, E: tl.constexpr):
    channel = start + tl.arange(0, E)[None, None, :]
    value = value.to(pointer.dtype.element_ty)
    tl.store(pointer + rows + channel * stride_channel, value, mask=exists & (channel < DIM))


@triton.jit
def token_matrices(gated, mix_in, carry, S: tl.constexpr, HAS_CARRY: tl.constexpr, HAS_MIX: tl.constexpr, COMPUTE: tl.constexpr):
    """T [S, R, R] and K = W_a + T W_a [S, R, C] of a tile of tokens, in the computing dtype; zero where there is none."""
    mixing, carrying = 0.0, 0.0
    if HAS_CARRY:
        carrying = tl.broadcast_to(carry[None, :, :], (S, carry.shape[0], carry.shape[1]))
    if HAS_MIX:
        flat = multiply(gated, mix_in, COMPUTE)
        if HAS_CARRY:
            carrying += tl.reshape(multiply(flat, carry, COMPUTE), (S, carry.shape[0], carry.shape[1]))
        mixing = tl.reshape(flat, (S, mix_in.shape[1], mix_in.shape[1])).to(COMPUTE)
    if HAS_CARRY:
        carrying = carrying.to(COMPUTE)
    return mixing, carrying


@triton.jit
def updated_chunk(
    field, carried, mixing, carrying, HAS_CARRY: tl.constexpr, HAS_MIX: tl.constexpr, EXACT: tl.constexpr, COMPUTE: tl.constexpr
):
    """z'' of a chunk of channels, [S, R, E] in float32, before any normalisation."""
    if HAS_CARRY and HAS_MIX:
        change = multiply(mixing, field, COMPUTE) + multiply(carrying, carried, COMPUTE)
    elif HAS_MIX:
        change = multiply(mixing, field, COMPUTE)
    else:
        change = multiply(carrying, carried, COMPUTE)
    return add_identity(change, field, EXACT, COMPUTE)
