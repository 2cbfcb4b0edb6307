"""Shared by the forward and backward kernels of the field update: sizes, loads, and the matrices of a token.

A token's update is linear in its field z [G, D] and in its attended field c [H, D]:

    z'' = z + T z + K c,   T = W_2 diag(psi) W_1,   psi = silu(gate),   K = W_a + T W_a

so a kernel forms the two small matrices T [G, G] and K [G, H] of each token and applies them to tiles of the fields on
the matrix units, with one token per element of a batched product. z' = z + W_a c is never formed, nor in backward.

Complex mixing is real mixing of twice the heads: the real and imaginary halves of a field are separate rows, and the
weight a + ib is the matrix [[a, -b], [b, a]]. PARTS is 1 for real and 2 for complex weights.

Shapes: S tokens of a tile, R rows of a field (PARTS x padded G), C rows of the attended field (PARTS x padded H), J
gates (PARTS x padded I), E channels of a chunk. Heads and gates are zero-padded to powers of two, rows to 16.
"""

# mypy: allow-untyped-defs, no-check-untyped-defs

from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from .reference import EPSILON

# the smallest side of a product on the matrix units
UNIT = 16
# a token is one element of a batched product, and the work of one warp
WARPS = 4

# the interpreter multiplies the bits of bfloat16 as integers, and truncates where a device rounds
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

Given = TypeVar("Given", Tensor, Tensor | None)

LANGUAGE_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@dataclass(frozen=True)
class Update:
    """Sizes and dtypes of one update, and its division into tiles."""

    parts: int
    tokens: int
    groups: int
    heads: int
    gates: int
    dim: int
    """Channels of a part: D, or D / 2 for complex weights."""
    compute: torch.dtype
    """Dtype of the operands of products: that of the attended field and the gates."""
    has_carry: bool
    has_mix: bool
    normalize: bool

    @classmethod
    def of(
        cls,
        field: Tensor,
        attended: Tensor | None,
        gate: Tensor | None,
        carry: Tensor | None,
        mix_in: Tensor | None,
        normalize: bool,
    ) -> "Update":
        """Derive them from the arguments of an update."""
        _, groups, tokens, dim = field.shape
        parts = 2 if 3 in (carry.dim() if carry is not None else 0, mix_in.dim() if mix_in is not None else 0) else 1
        source = attended if attended is not None else gate
        assert source is not None
        return cls(
            parts=parts,
            tokens=tokens,
            groups=groups,
            heads=attended.shape[1] if attended is not None else 1,
            gates=mix_in.shape[-2] if mix_in is not None else 1,
            dim=dim // parts,
            compute=source.dtype,
            has_carry=attended is not None,
            has_mix=gate is not None,
            normalize=normalize,
        )

    def constants(self, chunk: int, num_fields: int, device: torch.device) -> dict[str, Any]:
        """Compile-time constants of the kernels.

        chunk: elements of a token's field that a warp holds at a time; num_fields: number of tensors [B, G, N, D] that
        the kernel reads.
        """
        rows = self._padded(self.groups) * num_fields + self._padded(self.heads) * self.has_carry
        # normalisation reads a tile twice
        tile_bytes = WARPS * rows * self.parts * self.dim * self.compute.itemsize * (2 if self.normalize else 1)
        # two tiles in flight in each of two programs
        room = shared_memory(device) // 4
        channels = chunk // (self.parts * self._padded(max(self.groups, self.heads)))
        return {
            "PARTS": self.parts,
            "GROUPS": self.groups,
            "HEADS": self.heads,
            "GATES": self.gates,
            "DIM": self.dim,
            "PADDED_GROUPS": self._padded(self.groups),
            "PADDED_HEADS": self._padded(self.heads),
            "PADDED_GATES": self._padded(self.gates),
            "S": WARPS,
            "E": max(UNIT, min(channels, triton.next_power_of_2(self.dim))),
            "HAS_CARRY": self.has_carry,
            "HAS_MIX": self.has_mix,
            "NORMALIZE": self.normalize,
            "EPSILON": EPSILON,
            "COMPUTE": LANGUAGE_TYPES[self.compute],
            "num_warps": WARPS,
            # tiles in flight at a time
            "num_stages": 3 if tile_bytes <= room else 2 if tile_bytes <= 2 * room else 1,
        }

    def _padded(self, count: int) -> int:
        return max(triton.next_power_of_2(count), UNIT // self.parts)

    def exact(self, tensor: Tensor) -> bool:
        """Whether a matrix unit can add a tensor to a product unchanged."""
        return tensor.dtype == self.compute and self.compute != torch.float32


def num_tiles(field: Tensor, warps: int | None = None) -> int:
    """A tile has as many tokens of one sequence as a program has warps. Default: those of this file."""
    return field.shape[0] * triton.cdiv(field.shape[2], warps or WARPS)


def num_programs(device: torch.device, num_tiles: int, per_processor: int) -> int:
    """Each program handles many tiles, so that weights are read, and their gradients written, once per program."""
    # few enough for the interpreter that a program handles several tiles
    limit = _num_processors(device) * per_processor if device.type == "cuda" else 2
    return max(1, min(limit, num_tiles))


@cache
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def shared_memory(device: torch.device) -> int:
    """Shared memory per program in bytes."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
    return 0


def contiguous(weight: Tensor | None) -> Tensor | None:
    """A weight in the layout of load_weight."""
    return None if weight is None else weight.contiguous()


def dense(tensor: Given) -> Given:
    """A tensor with adjacent elements in its last axis, as the kernels read it."""
    return tensor if tensor is None or tensor.stride(-1) == 1 else tensor.contiguous()


def strides(tensor: Tensor | None, axes: int) -> tuple[int, ...]:
    """Strides of all axes but the last; unused for a tensor not given."""
    return (0,) * (axes - 1) if tensor is None else tensor.stride()[:-1]


@triton.jit
def by_head(tokens, HEADS: tl.constexpr, WIDTH: tl.constexpr):
    """Strides of sequences, heads and tokens of a contiguous [B, HEADS, tokens, WIDTH]."""
    return HEADS * WIDTH * tl.cast(tokens, tl.int64), WIDTH * tokens, WIDTH


@triton.jit
def by_token(tokens, HEADS: tl.constexpr, WIDTH: tl.constexpr):
    """Strides if the heads of a token are adjacent, as in projections."""
    return HEADS * WIDTH * tl.cast(tokens, tl.int64), WIDTH, HEADS * WIDTH


@triton.jit
def load_weight(
    weight,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PADDED_ROWS: tl.constexpr,
    PADDED_COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
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
def store_matrix(pointer, matrix, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Store the first ROWS and COLUMNS of a matrix, contiguous."""
    row = tl.arange(0, matrix.shape[0])[:, None]
    column = tl.arange(0, matrix.shape[1])[None, :]
    tl.store(pointer + row * COLUMNS + column, matrix, mask=(row < ROWS) & (column < COLUMNS))


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
    """The gradient of a weight [ROWS, COLUMNS] or [2, ROWS, COLUMNS] from that of the matrix load_weight built."""
    if PARTS == 2:
        row_part = tl.arange(0, 2 * PADDED_ROWS)[:, None] // PADDED_ROWS
        column_part = tl.arange(0, 2 * PADDED_COLUMNS)[None, :] // PADDED_COLUMNS
        # the imaginary part is below the diagonal, and with its sign changed above it
        imaginary = tl.reshape(gradient * (row_part - column_part).to(tl.float32), (2, PADDED_ROWS, 2, PADDED_COLUMNS))
        real = tl.reshape(gradient * (row_part == column_part).to(tl.float32), (2, PADDED_ROWS, 2, PADDED_COLUMNS))
        store_matrix(pointer, tl.sum(tl.sum(real, 2), 0), ROWS, COLUMNS)
        store_matrix(pointer + ROWS * COLUMNS, tl.sum(tl.sum(imaginary, 2), 0), ROWS, COLUMNS)
    else:
        store_matrix(pointer, gradient, ROWS, COLUMNS)


@triton.jit
def rows_of(
    strides,
    sequence,
    token,
    tokens,
    HEADS: tl.constexpr,
    PADDED: tl.constexpr,
    DIM: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Offsets of the rows of a tile of tokens in a field, and which of them exist: both [S, PARTS x PADDED, 1].

    strides: of sequences, heads and tokens.
    """
    row = tl.arange(0, PARTS * PADDED)
    part, head = row // PADDED, row % PADDED
    # 64 bits: a long batch of fields has more than 2^31 elements
    within = head.to(tl.int64) * strides[1] + part * DIM
    begin = sequence * strides[0] + token.to(tl.int64) * strides[2]
    exists = (token < tokens)[:, None] & (head < HEADS)[None, :]
    return (begin[:, None] + within[None, :])[:, :, None], exists[:, :, None]


@triton.jit
def load_chunk(pointer, rows, exists, start, DIM: tl.constexpr, E: tl.constexpr):
    """Load channels start to start + E of the rows of a tile, [S, R, E] or [S, E]; zero if missing."""
    channel = start + tl.arange(0, E)
    return tl.load(pointer + rows + channel, mask=exists & (channel < DIM), other=0.0)


@triton.jit
def store_chunk(pointer, rows, exists, start, value, DIM: tl.constexpr, E: tl.constexpr):
    """Store channels start to start + E of the rows of a tile, from [S, R, E] or [S, E]."""
    channel = start + tl.arange(0, E)
    value = rounded(value, pointer.dtype.element_ty)
    tl.store(pointer + rows + channel, value, mask=exists & (channel < DIM))


@triton.jit
def load_gates(gate, strides, sequence, token, tokens, GATES: tl.constexpr, PADDED: tl.constexpr, PARTS: tl.constexpr):
    """Load the gates of a tile of tokens, [S, J] in float32; complex weights use each of them twice.

    strides: of sequences and tokens.
    """
    index = tl.arange(0, PARTS * PADDED) % PADDED
    begin = sequence * strides[0] + token.to(tl.int64) * strides[1]
    exists = (token < tokens)[:, None] & (index < GATES)[None, :]
    return tl.load(gate + begin[:, None] + index[None, :], mask=exists, other=0.0).to(tl.float32)


@triton.jit
def silu(gates):
    """psi = gate * sigmoid(gate)."""
    return gates * tl.sigmoid(gates)


@triton.jit
def silu_slope(gates):
    """dpsi / dgate."""
    share = tl.sigmoid(gates)
    return share * (1.0 + gates * (1.0 - share))


@triton.jit
def rounded(value, DTYPE: tl.constexpr):
    """Round float32 to a dtype."""
    if INTERPRETED and value.dtype == tl.float32 and tl.bfloat16 == DTYPE:
        bits = value.to(tl.uint32, bitcast=True)
        value = (bits + 0x7FFF + ((bits >> 16) & 1)).to(tl.float32, bitcast=True)
    return value.to(DTYPE)


@triton.jit
def multiply(left, right, COMPUTE: tl.constexpr):
    """A product on the matrix units: operands in the computing dtype, sums in float32.

    Float32 operands are split into two parts of 11 bits each, with negligible loss; products without the matrix units
    would need too many registers.
    """
    left, right = rounded(left, COMPUTE), rounded(right, COMPUTE)
    if INTERPRETED:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, input_precision="tf32x3")


@triton.jit
def add_identity(product, field, EXACT: tl.constexpr, COMPUTE: tl.constexpr):
    """Add a field to a product, both [S, R, E]."""
    if EXACT:
        # one times a number is exact in any dtype: the matrix unit adds the field from where it already is
        row = tl.arange(0, field.shape[1])
        identity = (row[:, None] == row[None, :]).to(tl.float32)
        identity = tl.broadcast_to(identity[None, :, :], (field.shape[0], field.shape[1], field.shape[1]))
        product += multiply(identity, field, COMPUTE)
    else:
        product += field.to(tl.float32)
    return product


@triton.jit
def gated_weight(psi, mix_out, COMPUTE: tl.constexpr):
    """W_2 diag(psi) of a tile of tokens, [S x R, J]."""
    gated = rounded(mix_out[None, :, :] * psi[:, None, :], COMPUTE)
    return tl.reshape(gated, (psi.shape[0] * mix_out.shape[0], mix_out.shape[1]))


@triton.jit
def token_matrices(
    gated, mix_in, carry, S: tl.constexpr, HAS_CARRY: tl.constexpr, HAS_MIX: tl.constexpr, COMPUTE: tl.constexpr
):
    """T [S, R, R] and K = W_a + T W_a [S, R, C] of a tile, in the computing dtype; zero for an omitted step."""
    mixing, carrying = 0.0, 0.0
    if HAS_CARRY:
        carrying = tl.broadcast_to(carry[None, :, :], (S, carry.shape[0], carry.shape[1]))
    if HAS_MIX:
        flat = multiply(gated, mix_in, COMPUTE)
        mixing = rounded(tl.reshape(flat, (S, mix_in.shape[1], mix_in.shape[1])), COMPUTE)
        if HAS_CARRY:
            carrying += tl.reshape(multiply(flat, carry, COMPUTE), (S, carry.shape[0], carry.shape[1]))
    if HAS_CARRY:
        carrying = rounded(carrying, COMPUTE)
    return mixing, carrying


@triton.jit
def updated_chunk(
    field,
    attended,
    mixing,
    carrying,
    HAS_CARRY: tl.constexpr,
    HAS_MIX: tl.constexpr,
    EXACT: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """z'' of a chunk of channels, [S, R, E] in float32, before normalisation."""
    if HAS_MIX:
        change = multiply(mixing, field, COMPUTE)
        if HAS_CARRY:
            change += multiply(carrying, attended, COMPUTE)
    else:
        change = multiply(carrying, attended, COMPUTE)
    return add_identity(change, field, EXACT, COMPUTE)


@triton.jit
def both_parts(sums, PARTS: tl.constexpr):
    """Sums [S, R] of the real and imaginary parts of a head, added and assigned to both."""
    if PARTS == 2:
        heads: tl.constexpr = sums.shape[1] // 2
        total = tl.sum(tl.reshape(sums, (sums.shape[0], 2, heads)), 1)
        total = tl.broadcast_to(total[:, None, :], (sums.shape[0], 2, heads))
        sums = tl.reshape(total, (sums.shape[0], 2 * heads))
    return sums


@triton.jit
def inverse_rms(squares, DIM: tl.constexpr, PARTS: tl.constexpr, EPSILON: tl.constexpr):
    """1 / rms [S, R] from the sums of squares of the rows."""
    return tl.rsqrt(both_parts(squares, PARTS) * (2.0 / (PARTS * DIM)) + EPSILON)
