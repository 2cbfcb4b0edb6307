"""PaTH's products of reflections as an operator that torch.compile does not look into: plain PyTorch, block by block.

change_ij = scale q_i^T (H_i H_{i-1} ... H_{j+1} - I) k_j,  H_t = I - v_t v_t^T.

The matrices of a block of tokens, multiplied, are I - V^T A V with A = (I + L)^-1, where L is the part of V V^T below
the diagonal. A query goes through the blocks from right to left: with T = Q V^T, zero for tokens after the query,

    change = (Q - Q_start) K^T - T (A W),  W the part of V K^T below the diagonal,
    Q <- Q - T (A V).

Only the inputs are kept for the backward pass, which computes the rest again.

Shapes: B batch, N tokens, K keys, H query heads, G key-value heads, D head dimension, S tokens of a block, M rows: the
N tokens, each with the query heads of one key-value head.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, register_flop_formula

BLOCK = 64

torch.library.define(
    "equitape::reflected_products", "(Tensor query, Tensor key, Tensor direction, Tensor last, float scale) -> Tensor"
)
torch.library.define(
    "equitape::reflected_products_backward",
    "(Tensor gradient, Tensor query, Tensor key, Tensor direction, Tensor last, float scale) -> "
    "(Tensor, Tensor, Tensor)",
)
reflected_products = torch.ops.equitape.reflected_products.default
reflected_products_backward = torch.ops.equitape.reflected_products_backward.default


def _forward(query: Tensor, key: Tensor, direction: Tensor, last: Tensor, scale: float) -> Tensor:
    """[B, H, N, K] in the dtype of the query; computed in float32 at least.

    query: [B, H, N, D]; key, direction: [B, G, K, D]; last: [B or 1, N], index of each query's own token among the
    keys. These indices grow along the tokens. Numbers of later keys mean nothing.
    """
    heads, blocks = query.shape[1], _make_blocks(query, key, direction, last)
    start = _rows(query, key).to(blocks.keys.dtype) * scale
    changed, change = start.clone(), start.new_zeros(*start.shape[:3], key.shape[2], dtype=query.dtype)
    for block in reversed(range(blocks.keys.shape[2])):
        rows, keys = blocks.cut(block)
        now = changed[:, :, rows]
        turned = blocks.turn(now, block, rows)
        found = (now - start[:, :, rows]) @ blocks.keys[:, :, block].mT - turned @ blocks.of_keys[:, :, block]
        change[:, :, rows, keys] = found[..., : change[:, :, rows, keys].shape[-1]]
        now -= turned @ blocks.of_queries[:, :, block]
    return _heads(change, heads)


def _backward(
    gradient: Tensor, query: Tensor, key: Tensor, direction: Tensor, last: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and direction."""
    heads, size, blocks = query.shape[1], key.shape[-1], _make_blocks(query, key, direction, last)
    start = _rows(query, key).to(blocks.keys.dtype) * scale
    gradient, changed, passed = _rows(gradient, key), start.clone(), []
    for block in reversed(range(blocks.keys.shape[2])):
        rows, _ = blocks.cut(block)
        now = changed[:, :, rows]
        turned = blocks.turn(now, block, rows)
        passed.append((now - start[:, :, rows], turned))
        now -= turned @ blocks.of_queries[:, :, block]
    of_start, of_changed = torch.zeros_like(start), torch.zeros_like(start)
    of_keys, of_directions, of_products = (torch.zeros_like(x) for x in (blocks.keys, blocks.directions, blocks.solved))
    for block in range(blocks.keys.shape[2]):
        rows, keys = blocks.cut(block)
        moved, turned = passed.pop()
        given = gradient[:, :, rows, keys].to(start.dtype)
        given = nn.functional.pad(given, (0, blocks.keys.shape[3] - given.shape[-1]))
        after = of_changed[:, :, rows]
        of_products[:, :, block] = -turned.mT @ torch.cat((given, after), dim=-1)
        of_turned = -(given @ blocks.of_keys[:, :, block].mT + after @ blocks.of_queries[:, :, block].mT)
        of_turned = blocks.hide(of_turned, block, rows)
        of_keys[:, :, block] = given.mT @ moved
        of_directions[:, :, block] = of_turned.mT @ (moved + start[:, :, rows])
        direct = given @ blocks.keys[:, :, block]
        of_start[:, :, rows] -= direct
        after += direct + of_turned @ blocks.directions[:, :, block]
    # solved = A [W | V]
    of_met = blocks.inverse.mT @ of_products
    below = -(of_met @ blocks.solved.mT).tril(-1)
    of_met_keys, of_met_queries = of_met.split((of_met.shape[-1] - size, size), dim=-1)
    of_met_keys = of_met_keys.tril(-1)
    of_keys += of_met_keys.mT @ blocks.directions
    of_directions += of_met_keys @ blocks.keys + of_met_queries + (below + below.mT) @ blocks.directions
    of_query = _heads((of_start + of_changed) * scale, heads)
    of_key, of_direction = (x.flatten(2, 3)[:, :, : key.shape[2]].contiguous() for x in (of_keys, of_directions))
    return of_query.to(query.dtype), of_key.to(key.dtype), of_direction.to(direction.dtype)


class _Blocks(NamedTuple):
    """What is the same for all queries. Blocks are along the third axis."""

    keys: Tensor
    """[B, G, blocks, S, D], as the directions v."""
    directions: Tensor
    inverse: Tensor
    """A, [B, G, blocks, S, S]."""
    solved: Tensor
    """A [W | V], [B, G, blocks, S, S + D]."""
    last: Tensor
    """[B or 1, 1, M, 1], index of the token of each row."""
    rows: tuple[int, ...]
    """First row that a block matters to."""

    @property
    def of_keys(self) -> Tensor:
        """A W."""
        return self.solved[..., : self.keys.shape[3]]

    @property
    def of_queries(self) -> Tensor:
        """A V."""
        return self.solved[..., self.keys.shape[3] :]

    def cut(self, block: int) -> tuple[slice, slice]:
        """Rows that a block matters to, and its keys."""
        size = self.keys.shape[3]
        return slice(self.rows[block], None), slice(block * size, (block + 1) * size)

    def turn(self, queries: Tensor, block: int, rows: slice) -> Tensor:
        """T."""
        return self.hide(queries @ self.directions[:, :, block].mT, block, rows)

    def hide(self, x: Tensor, block: int, rows: slice) -> Tensor:
        """x, [B, G, M, S], zero for tokens after the query."""
        size = self.keys.shape[3]
        place = torch.arange(block * size, (block + 1) * size, device=x.device)
        return x * (self.last[:, :, rows] >= place)


def _make_blocks(query: Tensor, key: Tensor, direction: Tensor, last: Tensor) -> _Blocks:
    num_tokens, num_keys = query.shape[2], key.shape[2]
    wide = torch.promote_types(query.dtype, torch.float32)
    # a power of two, for the inverse
    size = min(BLOCK, 1 << (num_keys - 1).bit_length())
    keys, directions = (
        nn.functional.pad(x.to(wide), (0, 0, 0, -num_keys % size)).unflatten(2, (-1, size)) for x in (key, direction)
    )
    inverse = invert((directions @ directions.mT).tril(-1))
    solved = inverse @ torch.cat(((directions @ keys.mT).tril(-1), directions), dim=-1)
    ratio = query.shape[1] // key.shape[1]
    # the own tokens of queries follow each other among the keys, so query i has at most key K - N + i
    first = tuple(max(0, block * size - (num_keys - num_tokens)) * ratio for block in range(keys.shape[2]))
    return _Blocks(keys, directions, inverse, solved, last.repeat_interleave(ratio, -1)[:, None, :, None], first)


def invert(below: Tensor) -> Tensor:
    """(I + L)^-1 of L [..., S, S], which is zero but below its diagonal; S is a power of two.

    Of [[A, 0], [B, C]] it is [[A', 0], [-C' B A', C']], with A' and C' the inverses of half the size.
    """
    size, half = below.shape[-1], 1
    inverse = torch.eye(size, dtype=below.dtype, device=below.device).expand_as(below).clone()
    while half < size:
        old, new = (_diagonal_blocks(x, 2 * half) for x in (below, inverse))
        new[..., half:, :half] = -(new[..., half:, half:] @ old[..., half:, :half] @ new[..., :half, :half])
        half *= 2
    return inverse


def _diagonal_blocks(x: Tensor, size: int) -> Tensor:
    """The blocks [..., n, size, size] on the diagonal of [..., n size, n size], as a view."""
    tiles = x.unflatten(-1, (-1, size)).unflatten(-3, (-1, size))
    return tiles.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def _rows(x: Tensor, key: Tensor) -> Tensor:
    """[B, H, N, any] to [B, G, M, any]."""
    return x.unflatten(1, (key.shape[1], -1)).transpose(2, 3).flatten(2, 3)


def _heads(x: Tensor, heads: int) -> Tensor:
    """[B, G, M, any] to [B, H, N, any]."""
    ratio = heads // x.shape[1]
    return x.unflatten(2, (-1, ratio)).transpose(2, 3).flatten(1, 2).contiguous()


@torch.library.register_fake("equitape::reflected_products")
def _empty_change(query: Tensor, key: Tensor, direction: Tensor, last: Tensor, scale: float) -> Tensor:
    return query.new_empty(*query.shape[:3], key.shape[2])


@torch.library.register_fake("equitape::reflected_products_backward")
def _empty_gradients(gradient: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs[:3])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return *reflected_products_backward(gradient, *ctx.saved_tensors, ctx.scale), None, None


def _count_operations(function: Callable[..., Any]) -> Callable[..., int]:
    """For torch's counter, which cannot see inside an operator: the matrix products that a function makes."""

    def count(*inputs: Any, out_val: Any = None) -> int:
        shapes = [torch.empty_like(x, device="meta") if isinstance(x, Tensor) else x for x in inputs]
        with FlopCounterMode(display=False) as counter:
            function(*shapes)
        return counter.get_total_flops()

    return count


register_flop_formula(torch.ops.equitape.reflected_products, get_raw=True)(_count_operations(_forward))
register_flop_formula(torch.ops.equitape.reflected_products_backward, get_raw=True)(_count_operations(_backward))


def _without_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(first: Tensor, *others: Any) -> Any:
        with torch.autocast(first.device.type, enabled=False):
            return function(first, *others)

    return run


torch.library.impl("equitape::reflected_products", "default", _without_autocast(_forward))
torch.library.impl("equitape::reflected_products_backward", "default", _without_autocast(_backward))
torch.library.register_autograd("equitape::reflected_products", _gradients, setup_context=_save)
