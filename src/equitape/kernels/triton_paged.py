"""Attention over a paged cache: every request's keys and values are read where they lie, without gathering them first.

A token has two rows of the cache, [key | end of the value] and [start of the value] (model/paged.py).

Shapes: N new tokens of R requests, K keys of all requests, H query heads, G key-value heads, T tokens of a tile,
M = T * H / G rows of a tile.
"""

# mypy: allow-untyped-defs, no-check-untyped-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

KEYS = 64
"""Keys that a program reads at a time."""
LOG2_E = 1.4426950408889634


@triton.jit(do_not_specialize=["requests"])
def paged_attention_kernel(
    output,
    query,
    first,
    second,
    rows,
    ends,
    key_ends,
    requests,
    query_by_token,
    query_by_head,
    first_by_row,
    first_by_head,
    second_by_row,
    second_by_head,
    output_by_token,
    output_by_head,
    scale,
    RATIO: tl.constexpr,
    T: tl.constexpr,
    M: tl.constexpr,
    KEYS: tl.constexpr,
    KEY: tl.constexpr,
    PADDED_KEY: tl.constexpr,
    START: tl.constexpr,
    PADDED_START: tl.constexpr,
    END: tl.constexpr,
    PADDED_END: tl.constexpr,
):
    """One tile of one request's tokens, for the query heads of one key-value head.

    KEY, START, END: widths of the key and of the value's parts. Tiles are numbered through all requests: request r
    begins with number ends[r] // T + r.
    """
    tile = tl.program_id(0)
    group = tl.program_id(1)
    # the last request that begins at this tile or before
    low: tl.int32 = 0
    high = requests
    while low < high:
        middle = (low + high) // 2
        if tl.load(ends + middle) // T + middle <= tile:
            low = middle + 1
        else:
            high = middle
    request = low - 1
    begin = tl.load(ends + request)
    count = tl.load(ends + request + 1) - begin
    offset = (tile - (begin // T + request)) * T
    if offset < count:
        key_begin = tl.load(key_ends + request)
        num_keys = tl.load(key_ends + request + 1) - key_begin
        held = num_keys - count
        row = tl.arange(0, M)
        token = offset + row // RATIO
        head = group * RATIO + row % RATIO
        exists = (token < count) & (row < T * RATIO)
        key_column = tl.arange(0, PADDED_KEY)
        start_column = tl.arange(0, PADDED_START)
        at = query + (begin + token)[:, None] * query_by_token + head[:, None] * query_by_head
        queries = tl.load(at + key_column[None, :], mask=exists[:, None] & (key_column < KEY)[None, :], other=0.0)
        best = tl.full([M], -1e30, tl.float32)
        total = tl.zeros([M], tl.float32)
        of_start = tl.zeros([M, PADDED_START], tl.float32)
        of_end = tl.zeros([M, PADDED_END], tl.float32)
        end_column = tl.arange(0, PADDED_END)
        seen = tl.minimum(num_keys, held + offset + T)
        for start in range(0, seen, KEYS):
            place = start + tl.arange(0, KEYS)
            valid = place < seen
            where = tl.load(rows + key_begin + place, mask=valid, other=0)
            from_first = first + where[:, None] * first_by_row + group * first_by_head
            keys = tl.load(
                from_first + key_column[None, :], mask=valid[:, None] & (key_column < KEY)[None, :], other=0.0
            )
            scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
            visible = valid[None, :] & (place[None, :] <= (held + token)[:, None])
            scores = tl.where(visible, scores, -1e30)
            newest = tl.maximum(best, tl.max(scores, 1))
            weights = tl.where(visible, tl.exp2(scores - newest[:, None]), 0.0)
            shrink = tl.exp2(best - newest)
            best = newest
            total = total * shrink + tl.sum(weights, 1)
            from_second = second + where[:, None] * second_by_row + group * second_by_head
            values = tl.load(
                from_second + start_column[None, :], mask=valid[:, None] & (start_column < START)[None, :], other=0.0
            )
            rounded = weights.to(values.dtype)
            of_start = of_start * shrink[:, None] + tl.dot(rounded, values, input_precision="ieee")
            if END > 0:
                others = tl.load(
                    from_first + KEY + end_column[None, :],
                    mask=valid[:, None] & (end_column < END)[None, :],
                    other=0.0,
                )
                of_end = of_end * shrink[:, None] + tl.dot(rounded, others, input_precision="ieee")
        to = output + (begin + token)[:, None] * output_by_token + head[:, None] * output_by_head
        tl.store(
            to + start_column[None, :],
            (of_start / total[:, None]).to(output.dtype.element_ty),
            mask=exists[:, None] & (start_column < START)[None, :],
        )
        if END > 0:
            tl.store(
                to + START + end_column[None, :],
                (of_end / total[:, None]).to(output.dtype.element_ty),
                mask=exists[:, None] & (end_column < END)[None, :],
            )


def paged_attention(
    query: Tensor,
    first: Tensor,
    second: Tensor,
    rows: Tensor,
    ends: Tensor,
    key_ends: Tensor,
    widths: tuple[int, int],
    scale: float,
) -> Tensor:
    """Causal attention of the last tokens of every request: [N, H, value width].

    query: [N, H, key width]; first, second: the cache, [all rows, G, row width]; rows: [K] int64, where keys lie,
    request after request; ends, key_ends: [R + 1] int32, where requests end among tokens and keys, after a 0; widths:
    of keys and values. Tokens after the last request are padding, whose output is undefined.
    """
    num_tokens, num_heads = query.shape[:2]
    groups, (key, value) = first.shape[1], widths
    ratio = num_heads // groups
    start = min(value, second.shape[-1])
    requests = ends.shape[0] - 1
    # larger tiles where requests bring many tokens, as prompts do
    tokens = max(1, (64 if num_tokens >= 8 * requests else 16) // ratio)
    output = torch.empty(num_tokens, num_heads, value, dtype=query.dtype, device=query.device)
    paged_attention_kernel[(num_tokens // tokens + requests, groups)](
        output, query, first, second, rows, ends, key_ends, requests,
        query.stride(0), query.stride(1), first.stride(0), first.stride(1), second.stride(0), second.stride(1),
        output.stride(0), output.stride(1), scale * LOG2_E,
        RATIO=ratio, T=tokens, M=max(16, triton.next_power_of_2(tokens * ratio)), KEYS=KEYS,
        KEY=key, PADDED_KEY=max(16, triton.next_power_of_2(key)),
        START=start, PADDED_START=max(16, triton.next_power_of_2(start)),
        END=value - start, PADDED_END=max(16, triton.next_power_of_2(value - start)),
        num_warps=4 if start <= 128 else 8,
    )  # fmt: skip
    return output
