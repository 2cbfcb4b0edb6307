"""The layout of a head: real parts, then imaginary parts, and extra columns behind or inside them.

Shapes: B batch, N tokens, H query heads, G key-value heads, D head dimension, E extra columns.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn


class Columns(NamedTuple):
    """Extra columns of queries and keys; their products are added to the scores."""

    query: Tensor
    """[B or 1, H, N or 1, E]."""
    key: Tensor
    """[B or 1, G or 1, N or 1, E]."""
    inside: int | None = None
    """Number of key-value heads, from the first on, in which they replace the lowest frequencies, as in the query heads
    of these; other heads get none. None: they are appended to all heads.
    """

    def put(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [B, H, N, D] and keys [B, G, N, D] with these columns."""
        of_query = query_heads(self.inside, query, key)
        return put_columns(query, self.query, of_query), put_columns(key, self.key, self.inside)


def query_heads(inside: int | None, query: Tensor, key: Tensor) -> int | None:
    """The number of query heads [B, H, N, D] that belong to `inside` key-value heads [B, G, N, D]."""
    return None if inside is None else inside * (query.shape[1] // key.shape[1])


def side_by_side(*parts: Tensor) -> Tensor:
    """Parts [..., N, D], [..., N, E] and so on as [..., N, D + E].

    The compiler makes a kernel for every part of a concatenation. For a single token, where few kernels matter most, it
    gets choices between numbers instead, which it computes where they are used: in the write into the cache.
    """
    if not torch.compiler.is_compiling() or parts[0].shape[-2] != 1:
        return torch.cat(parts, dim=-1)
    joined, *others = parts
    for part in others:
        width, more = joined.shape[-1], part.shape[-1]
        before = torch.arange(width + more, device=joined.device) < width
        joined = torch.where(before, nn.functional.pad(joined, (0, more)), nn.functional.pad(part, (width, 0)))
    return joined


def join_halves(first: Tensor, second: Tensor, columns: Tensor | None = None, inside: int | None = None) -> Tensor:
    """Heads [B, H, N, D] from their halves, with columns [B, H, N, E] appended, or in place of the lowest frequencies.

    Channels m and m + D / 2 belong to one frequency, so those are the last E / 2 of both halves. inside: number of
    heads, from the first on, in which they are replaced; None appends to all.
    """
    if columns is None:
        return torch.cat((first, second), dim=-1)
    columns = columns.expand(*first.shape[:-1], -1)
    if inside is None:
        return side_by_side(first, second, columns)
    others = inside < first.shape[1]
    if others and not torch.compiler.is_compiling():
        some = join_halves(first[:, :inside], second[:, :inside], columns[:, :inside], inside)
        return torch.cat((some, torch.cat((first[:, inside:], second[:, inside:]), dim=-1)), dim=1)
    one, two = columns.chunk(2, dim=-1)
    kept = first.shape[-1] - one.shape[-1]
    if torch.compiler.is_compiling():
        # one kernel for all: the compiler makes one for every part of a concatenation
        stays = torch.arange(first.shape[-1], device=first.device) < kept
        if others:
            stays = stays | (torch.arange(first.shape[1], device=first.device) >= inside)[:, None, None]
        halves = ((first, one), (second, two))
        return torch.cat([torch.where(stays, half, nn.functional.pad(new, (kept, 0))) for half, new in halves], dim=-1)
    return torch.cat((first[..., :kept], one, second[..., :kept], two), dim=-1)


def put_columns(x: Tensor, columns: Tensor, inside: int | None) -> Tensor:
    """Heads [B, H, N, D] with columns [B or 1, H or 1, N or 1, E], as in `join_halves`."""
    if inside is not None:
        first, second = x.chunk(2, dim=-1)
        return join_halves(first, second, columns, inside)
    return side_by_side(x, columns.expand(*x.shape[:-1], -1))


def take_columns(x: Tensor, count: int, inside: bool) -> Tensor:
    """The columns [..., E] that `put_columns` put there, and other channels of heads where it put none."""
    if not inside:
        return x[..., x.shape[-1] - count :]
    # not a concatenation, for which the compiler makes a kernel per part
    halves = x.unflatten(-1, (2, -1))
    return halves[..., halves.shape[-1] - count // 2 :].flatten(-2)
