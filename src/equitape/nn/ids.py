"""Ids of tokens with several axes, and where the tokens of a call are.

Ids of image patches are (row, column), of video patches (time, row, column), of spectrogram patches (time, frequency).
Tokens without a place on the grid, such as words and registers, have the same number on every axis, so that any two of
them differ as they would with one axis. Parts of one sequence follow each other: each starts one above the largest id
of the part before it, on every axis (as in multimodal RoPE).

Shapes: B batch, N tokens, A axes.
"""

from itertools import accumulate

import torch
from torch import Tensor

from ..encodings import PositionalEncoding, Positions
from ..encodings.positions import default_ids, ids_within_runs, index_runs, origin_with_cache, sequence_extent
from .core import describe


def grid_ids(*sizes: int, device: torch.device | None = None) -> Tensor:
    """Ids of a grid of patches, last axis fastest: `grid_ids(2, 3)` is [[0, 0], [0, 1], ...], [6, 2]."""
    if not sizes or any(not isinstance(size, int) or size < 1 for size in sizes):
        raise ValueError(f"The grid has sizes {sizes}; give one whole number of 1 or more per axis.")
    return torch.cartesian_prod(*(torch.arange(size, device=device) for size in sizes)).reshape(-1, len(sizes))


def token_ids(count: int, num_axes: int, device: torch.device | None = None) -> Tensor:
    """Ids of words or registers: token i has i on every axis, [count, A]."""
    if count < 0 or num_axes < 1:
        raise ValueError(f"There are {count} tokens on {num_axes} axes; give 0 tokens or more, and 1 axis or more.")
    return torch.arange(count, device=device)[:, None].expand(-1, num_axes)


def join_ids(*parts: Tensor) -> Tensor:
    """Ids [N, A] of parts that follow each other: each part starts one above the largest id before it."""
    shapes = [list(part.shape) for part in parts]
    if not parts or any(len(shape) != 2 or shape[1] != shapes[0][-1] for shape in shapes):
        raise ValueError(f"The parts have shapes {shapes}; each must be [N, A], all with the same number of axes A.")
    ends = [int(part.max()) + 1 if part.numel() else 0 for part in parts]
    starts = accumulate(ends[:-1], initial=0)
    return torch.cat([part + start for part, start in zip(parts, starts, strict=True)])


def locate(
    encoding: PositionalEncoding,
    x: Tensor,
    ids: Tensor | None = None,
    *,
    segment_ids: Tensor | None = None,
    padding_mask: Tensor | None = None,
    past_length: int = 0,
) -> Positions:
    """The positions of tokens x [B, N, C], for `initial_state`, `embed` and every layer.

    ids: [N] or [B, N], with several axes [N, A] or [B, N, A]. Default for one axis: counted from 0, in each packed
    sequence, without padding, after `past_length` cached tokens.
    segment_ids: [N] or [B, N], equal for neighbouring tokens of one packed sequence.
    padding_mask: [B, N], 1 for tokens and 0 for padding.
    """
    batch, num_tokens = x.shape[:2]
    valid = runs = None
    if padding_mask is not None:
        valid = check_ids("padding_mask", padding_mask, batch, num_tokens).bool().expand(batch, -1)
    if segment_ids is not None:
        if past_length:
            raise ValueError("segment_ids marks packed sequences, which a cache cannot continue; pass one of the two.")
        runs = index_runs(check_ids("segment_ids", segment_ids, batch, num_tokens).expand(batch, -1), valid)
    axes = encoding.geometry.num_axes
    if ids is not None:
        ids = check_ids("positions", ids, batch, num_tokens, axes)
        if ids.is_floating_point() and encoding.needs_extent:
            raise ValueError(
                f"positions are {ids.dtype}, but encoding {encoding.kind!r} counts whole tokens; give integers."
            )
    elif axes > 1:
        raise ValueError(
            f"The encoding has {axes} axes, so positions must be given: ids [N, {axes}] or [B, N, {axes}], for example "
            f"equitape.nn.grid_ids(rows, columns)."
        )
    elif runs is not None:
        ids = ids_within_runs(runs)
    elif past_length and valid is not None:
        raise ValueError("Pass positions if you pass padding_mask with a cache: cached padding is not known here.")
    else:
        ids = default_ids(num_tokens, past_length, valid, x.device)
    positions = Positions(ids=ids, segments=runs, valid=valid)
    if encoding.needs_extent:
        origin, span = sequence_extent(ids, runs, valid)
        if past_length:
            origin = origin_with_cache(ids, past_length, None, origin)
        positions = positions._replace(origin=origin, span=span)
    return positions


def check_ids(name: str, ids: Tensor, batch: int, num_tokens: int, axes: int = 1) -> Tensor:
    """Ids as [B or 1, N], or [B or 1, N, A] with several axes; ValueError for other shapes."""
    inner = [num_tokens] if axes == 1 else [num_tokens, axes]
    if isinstance(ids, Tensor):
        if list(ids.shape) == inner:
            return ids[None]
        if ids.dim() == len(inner) + 1 and list(ids.shape[1:]) == inner and ids.shape[0] in (1, batch):
            return ids
    more = f" and {axes} axes" if axes > 1 else ""
    raise ValueError(
        f"{name} {describe(ids)}; with {num_tokens} tokens in {batch} rows{more} it must be a tensor {inner} or "
        f"{[batch, *inner]}."
    )
