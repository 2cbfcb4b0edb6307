"""Complex matrices and fields in kernels: real and imaginary parts are separate tiles, here called a pair.

Shapes: S tokens of a tile, E frequencies of a chunk, M of a field.
"""

# mypy: allow-untyped-defs, no-check-untyped-defs

import triton
import triton.language as tl

from .triton_field import add_identity, load_chunk, multiply, rounded, store_chunk


@triton.jit
def load_pair(pointer, rows, exists, start, M: tl.constexpr, E: tl.constexpr):
    """Real and imaginary parts [S, rows, E] of frequencies start to start + E."""
    return load_chunk(pointer, rows, exists, start, M, E), load_chunk(pointer, rows + M, exists, start, M, E)


@triton.jit
def store_pair(pointer, rows, exists, start, pair, M: tl.constexpr, E: tl.constexpr):
    """Store what load_pair loads."""
    store_chunk(pointer, rows, exists, start, pair[0], M, E)
    store_chunk(pointer, rows + M, exists, start, pair[1], M, E)


@triton.jit
def load_matrix(
    pointer, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PADDED_ROWS: tl.constexpr, PADDED_COLUMNS: tl.constexpr,
    exists=True,
):  # fmt: skip
    """A contiguous [2, ROWS, COLUMNS] at each of the S pointers [S, 1, 1]: two padded matrices, as a pair."""
    row, column = tl.arange(0, PADDED_ROWS)[None, :, None], tl.arange(0, PADDED_COLUMNS)[None, None, :]
    at = pointer + row * COLUMNS + column
    exists = exists & (row < ROWS) & (column < COLUMNS)
    return tl.load(at, mask=exists, other=0.0), tl.load(at + ROWS * COLUMNS, mask=exists, other=0.0)


@triton.jit
def store_matrix(pointer, pair, ROWS: tl.constexpr, COLUMNS: tl.constexpr, exists=True):
    """Store what load_matrix loads."""
    row, column = tl.arange(0, pair[0].shape[1])[None, :, None], tl.arange(0, pair[0].shape[2])[None, None, :]
    at = pointer + row * COLUMNS + column
    exists = exists & (row < ROWS) & (column < COLUMNS)
    tl.store(at, rounded(pair[0], pointer.dtype.element_ty), mask=exists)
    tl.store(at + ROWS * COLUMNS, rounded(pair[1], pointer.dtype.element_ty), mask=exists)


@triton.jit
def times(weight, field, COMPUTE: tl.constexpr):
    """weight field, both pairs."""
    real, imaginary = multiply(weight[0], field[0], COMPUTE), multiply(weight[0], field[1], COMPUTE)
    real -= multiply(weight[1], field[1], COMPUTE)
    imaginary += multiply(weight[1], field[0], COMPUTE)
    return real, imaginary


@triton.jit
def adjoint_times(weight, field, COMPUTE: tl.constexpr):
    """weight^H field."""
    turned = tl.permute(weight[0], (0, 2, 1))
    real, imaginary = multiply(turned, field[0], COMPUTE), multiply(turned, field[1], COMPUTE)
    turned = tl.permute(weight[1], (0, 2, 1))
    real += multiply(turned, field[1], COMPUTE)
    imaginary -= multiply(turned, field[0], COMPUTE)
    return real, imaginary


@triton.jit
def times_adjoint(left, right, COMPUTE: tl.constexpr):
    """left right^H of two fields."""
    right_real, right_imaginary = tl.permute(right[0], (0, 2, 1)), tl.permute(right[1], (0, 2, 1))
    real = multiply(left[0], right_real, COMPUTE) + multiply(left[1], right_imaginary, COMPUTE)
    imaginary = multiply(left[1], right_real, COMPUTE) - multiply(left[0], right_imaginary, COMPUTE)
    return real, imaginary


@triton.jit
def carried(z, c, carry, HAS_CARRY: tl.constexpr, EXACT: tl.constexpr, COMPUTE: tl.constexpr):
    """x = z + W_a c in float32."""
    if HAS_CARRY:
        real, imaginary = times(carry, c, COMPUTE)
        return add_identity(real, z[0], EXACT, COMPUTE), add_identity(imaginary, z[1], EXACT, COMPUTE)
    return z[0].to(tl.float32), z[1].to(tl.float32)


@triton.jit
def mixed(x, mixing, HAS_MIX: tl.constexpr, COMPUTE: tl.constexpr):
    """y = x + T x in float32."""
    if HAS_MIX:
        real, imaginary = times(mixing, x, COMPUTE)
        return x[0] + real, x[1] + imaginary
    return x
