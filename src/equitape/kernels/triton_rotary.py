"""`apply_rotary`, queries and keys rotated by a field and given columns, and its backward pass: each in one pass over
memory.

Shapes: T tokens of a tile, M frequencies (padded to a power of two), B batch, H query heads, G key-value heads.
"""

# mypy: allow-untyped-defs, no-check-untyped-defs

import triton
import triton.language as tl
from torch import Tensor

from .launch import Launch, launch
from .triton_field import by_head, by_token, dense, rounded, strides

TILE = 2048
"""Complex numbers per tensor in a program."""


@triton.jit
def load_complex(pointer, strides, sequence, head, token, frequency, exists, M: tl.constexpr):
    """Real and imaginary parts [T, M] in float32 of one head of a half-split field.

    strides: of sequences, heads and tokens.
    """
    start = pointer + sequence * strides[0] + head * strides[1]
    at = start + token[:, None] * strides[2] + frequency[None, :]
    real = tl.load(at, mask=exists, other=0.0).to(tl.float32)
    return real, tl.load(at + M, mask=exists, other=0.0).to(tl.float32)


@triton.jit
def load_kept(pointer, strides, sequence, head, token, frequency, exists, kept, M: tl.constexpr):
    """load_complex, with zeros where not kept. A mask that ends inside a row would split its loads into small ones."""
    real, imaginary = load_complex(pointer, strides, sequence, head, token, frequency, exists, M)
    return tl.where(kept, real, 0.0), tl.where(kept, imaginary, 0.0)


@triton.jit
def store_complex(
    pointer, strides, sequence, head, token, frequency, exists, real, imaginary, M: tl.constexpr
):  # fmt: skip
    """Store what load_complex loads."""
    start = pointer + sequence * strides[0] + head * strides[1]
    at = start + token[:, None] * strides[2] + frequency[None, :]
    tl.store(at, rounded(real, pointer.dtype.element_ty), mask=exists)
    tl.store(at + M, rounded(imaginary, pointer.dtype.element_ty), mask=exists)


@triton.jit
def load_field(
    field, field_strides, changed, changed_strides, sequence, group, token, frequency, exists, tokens,
    M: tl.constexpr, STEP: tl.constexpr, PADDED_CHANGED: tl.constexpr,
):  # fmt: skip
    """The field of one head, [T, M]. STEP: 1, or every STEP-th frequency is in `changed`."""
    real, imaginary = load_complex(field, field_strides, sequence, group, token, frequency, exists, M)
    if STEP > 1:
        # whole rows of `changed`, spread afterwards: loads of single numbers take most of the time
        slot = tl.arange(0, PADDED_CHANGED)
        there = (token < tokens)[:, None] & (slot < M // STEP)[None, :]
        new_real, new_imaginary = load_complex(changed, changed_strides, sequence, group, token, slot, there, M // STEP)
        source = tl.broadcast_to(tl.minimum(frequency // STEP, PADDED_CHANGED - 1)[None, :], exists.shape)
        written = (frequency % STEP == 0)[None, :]
        real = tl.where(written, tl.gather(new_real, source, 1), real)
        imaginary = tl.where(written, tl.gather(new_imaginary, source, 1), imaginary)
    return real, imaginary


@triton.jit
def rotate_head(
    result, result_strides, x, x_strides, columns, column_strides, sequence, head, token, frequency, exists, tokens,
    z_real, z_imaginary, kept,
    M: tl.constexpr, KEPT: tl.constexpr, COLUMNS: tl.constexpr, PADDED_COLUMNS: tl.constexpr,
):  # fmt: skip
    """z x for one head, with its columns: from frequency KEPT on in both halves, or behind them if KEPT is M.

    kept: KEPT in heads with columns inside, M in others.
    """
    x_real, x_imaginary = load_complex(x, x_strides, sequence, head, token, frequency, exists, M)
    real = z_real * x_real - z_imaginary * x_imaginary
    imaginary = z_real * x_imaginary + z_imaginary * x_real
    start = columns
    if COLUMNS > 0:
        start = columns + sequence * column_strides[0] + head * column_strides[1]
    if KEPT < M:
        # one number per token and column: a tile of all frequencies would load each of its numbers by itself
        for index in tl.static_range(M - KEPT):
            replaced = (frequency == kept + index)[None, :]
            at = start + token * column_strides[2] + index
            one = tl.load(at, mask=token < tokens, other=0.0).to(tl.float32)
            two = tl.load(at + (M - KEPT), mask=token < tokens, other=0.0).to(tl.float32)
            real, imaginary = tl.where(replaced, one[:, None], real), tl.where(replaced, two[:, None], imaginary)
    store_complex(result, result_strides, sequence, head, token, frequency, exists, real, imaginary, M)
    if (KEPT == M) & (COLUMNS > 0):
        column = tl.arange(0, PADDED_COLUMNS)
        there = (token < tokens)[:, None] & (column < COLUMNS)[None, :]
        found = tl.load(start + token[:, None] * column_strides[2] + column[None, :], mask=there, other=0.0)
        start = result + sequence * result_strides[0] + head * result_strides[1] + 2 * M
        at = start + token[:, None] * result_strides[2] + column[None, :]
        tl.store(at, rounded(found.to(tl.float32), result.dtype.element_ty), mask=there)


@triton.jit
def rotary_kernel(
    rotated_query,
    rotated_key,
    query,
    key,
    field,
    changed,
    of_query,
    of_key,
    query_by_sequence,
    query_by_head,
    query_by_token,
    key_by_sequence,
    key_by_head,
    key_by_token,
    field_by_sequence,
    field_by_head,
    field_by_token,
    changed_by_sequence,
    changed_by_head,
    changed_by_token,
    of_query_by_sequence,
    of_query_by_head,
    of_query_by_token,
    of_key_by_sequence,
    of_key_by_head,
    of_key_by_token,
    tokens,
    GROUPS: tl.constexpr,
    RATIO: tl.constexpr,
    M: tl.constexpr,
    PADDED_M: tl.constexpr,
    KEPT: tl.constexpr,
    INSIDE: tl.constexpr,
    STEP: tl.constexpr,
    PADDED_CHANGED: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    PADDED_COLUMNS: tl.constexpr,
    T: tl.constexpr,
):
    """z x for every head. STEP: 1, or every STEP-th frequency of z is in `changed`.

    The heads of a token are adjacent in the results, of width WIDTH.
    """
    query_strides = (query_by_sequence, query_by_head, query_by_token)
    key_strides = (key_by_sequence, key_by_head, key_by_token)
    field_strides = (field_by_sequence, field_by_head, field_by_token)
    changed_strides = (changed_by_sequence, changed_by_head, changed_by_token)
    of_query_strides = (of_query_by_sequence, of_query_by_head, of_query_by_token)
    of_key_strides = (of_key_by_sequence, of_key_by_head, of_key_by_token)
    rotated_query_strides = by_token(tokens, GROUPS * RATIO, WIDTH)
    rotated_key_strides = by_token(tokens, GROUPS, WIDTH)
    token = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T)
    group = tl.program_id(1).to(tl.int64)
    sequence = tl.program_id(2).to(tl.int64)
    frequency = tl.arange(0, PADDED_M)
    exists = (token < tokens)[:, None] & (frequency < M)[None, :]
    kept = tl.where(group < INSIDE, KEPT, M)
    z_real, z_imaginary = load_field(
        field, field_strides, changed, changed_strides, sequence, group, token, frequency, exists, tokens,
        M, STEP, PADDED_CHANGED,
    )  # fmt: skip
    rotate_head(
        rotated_key, rotated_key_strides, key, key_strides, of_key, of_key_strides, sequence, group, token, frequency,
        exists, tokens, z_real, z_imaginary, kept, M, KEPT, COLUMNS, PADDED_COLUMNS,
    )  # fmt: skip
    for index in tl.static_range(RATIO):
        rotate_head(
            rotated_query, rotated_query_strides, query, query_strides, of_query, of_query_strides, sequence,
            group * RATIO + index, token, frequency, exists, tokens, z_real, z_imaginary, kept, M, KEPT,
            COLUMNS, PADDED_COLUMNS,
        )  # fmt: skip


@triton.jit
def rotary_backward_kernel(
    grad_query_in,
    grad_key_in,
    grad_field,
    grad_query,
    grad_key,
    query,
    key,
    field,
    changed,
    grad_query_by_sequence,
    grad_query_by_head,
    grad_query_by_token,
    grad_key_by_sequence,
    grad_key_by_head,
    grad_key_by_token,
    query_by_sequence,
    query_by_head,
    query_by_token,
    key_by_sequence,
    key_by_head,
    key_by_token,
    field_by_sequence,
    field_by_head,
    field_by_token,
    changed_by_sequence,
    changed_by_head,
    changed_by_token,
    tokens,
    GROUPS: tl.constexpr,
    RATIO: tl.constexpr,
    M: tl.constexpr,
    PADDED_M: tl.constexpr,
    KEPT: tl.constexpr,
    INSIDE: tl.constexpr,
    STEP: tl.constexpr,
    PADDED_CHANGED: tl.constexpr,
    T: tl.constexpr,
):
    """dx = conj(z) dy for every head; dz = z / |z|^2 times the sum over heads of conj(y) dy, where y = z x.

    dy is zero from frequency KEPT on in the first INSIDE groups. STEP: 1, or every STEP-th frequency of z is in
    `changed`, and only these get dz.

    In the gradients of queries and keys, the heads of a token are adjacent; that of the field is contiguous.
    """
    grad_query_strides = (grad_query_by_sequence, grad_query_by_head, grad_query_by_token)
    grad_key_strides = (grad_key_by_sequence, grad_key_by_head, grad_key_by_token)
    query_strides = (query_by_sequence, query_by_head, query_by_token)
    key_strides = (key_by_sequence, key_by_head, key_by_token)
    field_strides = (field_by_sequence, field_by_head, field_by_token)
    grad_query_in_strides = by_token(tokens, GROUPS * RATIO, 2 * M)
    grad_key_in_strides = by_token(tokens, GROUPS, 2 * M)
    changed_strides = (changed_by_sequence, changed_by_head, changed_by_token)
    grad_field_strides = by_head(tokens, GROUPS, 2 * M // STEP)
    token = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T)
    group = tl.program_id(1).to(tl.int64)
    sequence = tl.program_id(2).to(tl.int64)
    frequency = tl.arange(0, PADDED_M)
    exists = (token < tokens)[:, None] & (frequency < M)[None, :]
    kept = (frequency < tl.where(group < INSIDE, KEPT, M))[None, :]

    z_real, z_imaginary = load_field(
        field, field_strides, changed, changed_strides, sequence, group, token, frequency, exists, tokens,
        M, STEP, PADDED_CHANGED,
    )  # fmt: skip
    y_real, y_imaginary = load_complex(key, key_strides, sequence, group, token, frequency, exists, M)
    g_real, g_imaginary = load_kept(grad_key, grad_key_strides, sequence, group, token, frequency, exists, kept, M)
    store_complex(
        grad_key_in, grad_key_in_strides, sequence, group, token, frequency, exists,
        z_real * g_real + z_imaginary * g_imaginary, z_real * g_imaginary - z_imaginary * g_real, M,
    )  # fmt: skip
    sum_real = y_real * g_real + y_imaginary * g_imaginary
    sum_imaginary = y_real * g_imaginary - y_imaginary * g_real
    for index in tl.static_range(RATIO):
        head = group * RATIO + index
        y_real, y_imaginary = load_complex(query, query_strides, sequence, head, token, frequency, exists, M)
        g_real, g_imaginary = load_kept(
            grad_query, grad_query_strides, sequence, head, token, frequency, exists, kept, M
        )
        store_complex(
            grad_query_in, grad_query_in_strides, sequence, head, token, frequency, exists,
            z_real * g_real + z_imaginary * g_imaginary, z_real * g_imaginary - z_imaginary * g_real, M,
        )  # fmt: skip
        sum_real += y_real * g_real + y_imaginary * g_imaginary
        sum_imaginary += y_real * g_imaginary - y_imaginary * g_real

    square = z_real * z_real + z_imaginary * z_imaginary
    # where the field is zero, y contains nothing of x
    inverse = tl.where(square > 0.0, 1.0 / tl.where(square > 0.0, square, 1.0), 0.0)
    real = (sum_real * z_real - sum_imaginary * z_imaginary) * inverse
    imaginary = (sum_real * z_imaginary + sum_imaginary * z_real) * inverse
    if STEP > 1:
        slot = tl.arange(0, PADDED_CHANGED)
        source = tl.broadcast_to((slot * STEP)[None, :], (T, PADDED_CHANGED))
        exists = (token < tokens)[:, None] & (slot < M // STEP)[None, :]
        source = tl.where(exists, source, 0)
        real, imaginary = tl.gather(real, source, 1), tl.gather(imaginary, source, 1)
        frequency = slot
    store_complex(grad_field, grad_field_strides, sequence, group, token, frequency, exists, real, imaginary, M // STEP)


def steps(dim: int, changed: Tensor | None) -> dict[str, int]:
    """Compile-time arguments that say which frequencies have changed."""
    count = dim // 2 if changed is None else changed.shape[3] // 2
    # Triton 3.6 cannot gather from a single column
    return {"STEP": dim // 2 // count, "PADDED_CHANGED": max(2, triton.next_power_of_2(count))}


def apply_rotary_backward(
    gradients: tuple[Tensor, Tensor, Tensor],
    grad_query: Tensor,
    grad_key: Tensor,
    query: Tensor,
    key: Tensor,
    field: Tensor,
    replaced: int = 0,
    changed: Tensor | None = None,
    inside: int | None = None,
) -> None:
    """Write reference.apply_rotary_backward: queries [B, H, N, D], keys and field [B, G, N, D].

    In the gradients of queries and keys, the heads of a token are adjacent; that of the field is contiguous.
    """
    field = field.expand(*key.shape[:2], -1, -1)
    read = [dense(tensor) for tensor in (grad_query, grad_key, query, key, field, changed)]

    def describe() -> Launch:
        batch, groups, tokens, dim = field.shape
        padded = triton.next_power_of_2(dim // 2)
        tile = max(1, TILE // padded)
        return Launch(
            grid=(triton.cdiv(tokens, tile), groups, batch),
            numbers=(*(stride for tensor in read for stride in strides(tensor, 4)), tokens),
            constants={
                "GROUPS": groups,
                "RATIO": query.shape[1] // groups,
                "M": dim // 2,
                "PADDED_M": padded,
                "KEPT": dim // 2 - replaced,
                "INSIDE": groups if inside is None else inside,
                **steps(dim, changed),
                "T": tile,
            },
        )

    launch(rotary_backward_kernel, (*gradients, *read), (replaced, inside), describe)


def apply_rotary(
    rotated: tuple[Tensor, Tensor],
    query: Tensor,
    key: Tensor,
    field: Tensor,
    changed: Tensor | None,
    of_query: Tensor | None,
    of_key: Tensor | None,
    inside: int | None,
) -> None:
    """Write queries [B, H, N, D] and keys [B, G, N, D] times the field [B or 1, G or 1, N, D], with columns.

    changed: [B or 1, G, N, 2 F], in place of every (D / 2 F)-th frequency of the field. Columns are broadcast; inside
    says where they go, as that of `Columns`.
    """
    groups = key.shape[1]
    field = field.expand(*key.shape[:2], -1, -1)
    changed = None if changed is None else changed.expand(*key.shape[:2], -1, -1)
    of_query = None if of_query is None else of_query.expand(*query.shape[:3], -1)
    of_key = None if of_key is None else of_key.expand(*key.shape[:3], -1)
    read = [dense(tensor) for tensor in (query, key, field, changed, of_query, of_key)]

    def describe() -> Launch:
        batch, _, tokens, dim = key.shape
        padded, columns = triton.next_power_of_2(dim // 2), 0 if of_key is None else of_key.shape[3]
        tile = max(1, TILE // padded)
        return Launch(
            grid=(triton.cdiv(tokens, tile), groups, batch),
            numbers=(*(stride for tensor in read for stride in strides(tensor, 4)), tokens),
            constants={
                "GROUPS": groups,
                "RATIO": query.shape[1] // groups,
                "M": dim // 2,
                "PADDED_M": padded,
                "KEPT": dim // 2 if inside is None else dim // 2 - columns // 2,
                "INSIDE": groups if inside is None else inside,
                **steps(dim, changed),
                "WIDTH": rotated[0].shape[3],
                "COLUMNS": columns,
                "PADDED_COLUMNS": triton.next_power_of_2(max(columns, 1)),
                "T": tile,
            },
        )

    launch(rotary_kernel, (*rotated, *read), inside, describe)
