"""Positions: the id and sequence of each token. Built once per forward; nothing else derives them.

Shapes: B batch (1 where all rows agree), N tokens of this call, K keys (cached and new).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .shards import Shards


class Positions(NamedTuple):
    """Ids and sequences of the tokens in one forward."""

    ids: Tensor
    """[B, N] int64: the position of each token; [B, N, A] with several axes, then also fractions."""
    segments: Tensor | None = None
    """[B, N] int64: the run of each token in a packed batch; None if each row is one sequence."""
    valid: Tensor | None = None
    """[B, N] bool: False for padding; None without padding."""
    origin: Tensor | None = None
    """[B, N or 1] int64: the smallest id of the token's sequence, for encodings that measure from its start."""
    span: Tensor | None = None
    """[B, N or 1] int64: number of ids that the token's sequence covers in this call."""
    last_key: Tensor | None = None
    """[B or 1] int64: index among all tokens of the last cached one that is not padding; -1 for none. In a row of
    several sequences with a cache: of each sequence."""
    distances: Tensor | None = None
    """[B, 1, N, E]: the key columns of a decay by ids (decay.py), made once for all blocks."""
    drift: Tensor | None = None
    """[B, G, N]: what a clock has added to the ids."""
    counts: Tensor | None = None
    """[B, N] int64: number of the sequence's tokens before each one; None if these are the ids."""
    query_factor: Tensor | None = None
    """[B, N]: factor of each token's queries; None if they stay as they are."""
    shards: Shards | None = None
    """How the row is split over processes; None if this process has all of it."""


def grown_queries(positions: Positions, growth: float, start: int) -> Positions:
    """Positions whose queries grow with the tokens read: by 1 + growth * ln(tokens / start) beyond `start` tokens.

    Ids do not matter: jumps and shifts change distances, not the number of keys.
    """
    counts = positions.ids if positions.counts is None else positions.counts
    beyond = ((counts + 1).float() / start).clamp(min=1).log()
    return positions._replace(query_factor=1 + growth * beyond)


def may_read() -> bool:
    """Whether tensor values may be read: not while a graph is traced or captured."""
    if torch.compiler.is_compiling():
        return False
    return not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def index_runs(segment_ids: Tensor, valid: Tensor | None) -> Tensor:
    """Number the runs of equal segment ids from 0; padding forms separate runs. [B, N] -> [B, N]."""
    if valid is not None:
        segment_ids = segment_ids.masked_fill(~valid, -1)
    change = torch.zeros_like(segment_ids)
    change[:, 1:] = (segment_ids[:, 1:] != segment_ids[:, :-1]).long()
    return change.cumsum(-1)


def runs_from_restarts(ids: Tensor) -> Tensor:
    """Runs of a packed row: a new one starts where the id does not grow. [B, N] -> [B, N]."""
    restart = torch.zeros_like(ids)
    restart[:, 1:] = (ids[:, 1:] <= ids[:, :-1]).long()
    return restart.cumsum(-1)


def ids_within_runs(runs: Tensor) -> Tensor:
    """0, 1, 2, ... inside every run. [B, N] -> [B, N]."""
    index = torch.arange(runs.shape[1], device=runs.device)
    return index - torch.where(run_starts(runs), index, 0).cummax(-1).values


def cumulative_sum(x: Tensor) -> Tensor:
    """Cumulative sum over the last axis."""
    return _opaque_cumsum(x) if torch.compiler.is_compiling() else x.cumsum(-1)


@torch.library.custom_op("equitape::cumsum", mutates_args=())
def _opaque_cumsum(x: Tensor) -> Tensor:
    """Cumulative sum over the last axis as an operator: torch 2.11's compiler fails on a scan inside a cat."""
    return x.cumsum(-1)


@_opaque_cumsum.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


_opaque_cumsum.register_autograd(lambda ctx, gradient: gradient.flip(-1).cumsum(-1).flip(-1))


def run_starts(runs: Tensor) -> Tensor:
    """Where a new run starts. [B, N] -> [B, N] bool."""
    starts = torch.ones_like(runs, dtype=torch.bool)
    starts[:, 1:] = runs[:, 1:] != runs[:, :-1]
    return starts


def add_jumps(ids: Tensor, jumps: Tensor, runs: Tensor | None) -> Tensor:
    """Ids increased by jumps[j] from token j on to the end of its run. All [B, N]."""
    ahead = cumulative_sum(jumps)
    if runs is not None:
        ahead = ahead - torch.where(run_starts(runs), ahead - jumps, 0).cummax(-1).values
    return ids + ahead


def last_key(past_length: int | Tensor, padding: Tensor | None, device: torch.device) -> Tensor:
    """Index of the last cached token that is not padding: [B or 1], -1 for none. Arguments as in `key_ids`."""
    if padding is None:
        return torch.as_tensor(past_length, device=device).reshape(1) - 1
    index = torch.arange(padding.shape[1], device=device)
    return torch.where(padding & (index < past_length), index, -1).amax(-1)


def default_ids(num_tokens: int, past_length: int | Tensor, padding: Tensor | None, device: torch.device) -> Tensor:
    """Default ids: counted from 0 along the row, without padding.

    padding: [B, past + N] bool or None. Returns [B, N], or [1, N] without padding.
    """
    index = torch.arange(num_tokens, device=device) + past_length
    if padding is None:
        return index[None]
    return (padding.long().cumsum(-1) - 1).clamp(min=0)[:, index]


def sequence_extent(ids: Tensor, runs: Tensor | None, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """(smallest id, number of ids covered) of each token's sequence, without padding. Both [B, N or 1]."""
    largest = torch.iinfo(ids.dtype).max
    low = ids if valid is None else ids.masked_fill(~valid, largest)
    high = ids if valid is None else ids.masked_fill(~valid, -1)
    if runs is None:
        low, high = low.amin(-1, keepdim=True), high.amax(-1, keepdim=True)
    else:
        low = torch.full_like(runs, largest).scatter_reduce(1, runs, low.expand_as(runs), "amin").gather(1, runs)
        high = torch.full_like(runs, -1).scatter_reduce(1, runs, high.expand_as(runs), "amax").gather(1, runs)
    # for padding only, any finite value will do: nothing reads it
    low = torch.where(high < 0, 0, low)
    return low, (high - low + 1).clamp(min=1)


def origin_with_cache(ids: Tensor, past_length: int | Tensor, padding: Tensor | None, origin: Tensor) -> Tensor:
    """The first id of each row whose first tokens are cached: [B, 1]; `origin` if none are.

    Arguments as in `key_ids`.
    """
    first = ids[:, :1]
    if padding is None:
        before = torch.as_tensor(past_length, device=ids.device).reshape(1, 1)
    else:
        index = torch.arange(padding.shape[1], device=ids.device)
        before = (padding & (index < past_length)).sum(-1, keepdim=True)
        # the call may begin with padding, whose id is not counted on from the cached ones
        place = (padding & (index >= past_length)).long().argmax(-1, keepdim=True) - past_length
        first = ids.expand(padding.shape[0], -1).gather(1, place.clamp(0, ids.shape[1] - 1))
    return torch.where(before > 0, first - before, origin)


def key_ids(ids: Tensor, past_length: int | Tensor, first_key: int, num_keys: int, padding: Tensor | None) -> Tensor:
    """Ids of all keys of a call, including cached ones. [B, K].

    A cache holds keys and values, not ids. Keys of this call have the given ids; cached ones are counted back from the
    first of these, one per token without padding: a cache continues consecutive ids.

    ids: [B, N] of this call; past_length: tokens seen before; first_key: index of the first key still held (a
    sliding cache drops old ones); padding: [B, >= first_key + K] bool over all tokens, or None.
    """
    token = torch.arange(first_key, first_key + num_keys, device=ids.device)[None]
    if padding is None:
        counted_back = token - past_length
    else:
        # number of tokens up to each one; beyond the mask is the future, which nothing reads
        counts = padding.long().cumsum(-1)
        last = counts.shape[1] - 1
        start = torch.as_tensor(past_length, device=ids.device).reshape(1, 1).clamp(max=last)
        counted_back = counts[:, token[0].clamp(max=last)] - counts.gather(1, start.expand(counts.shape[0], 1))
    cached = ids[:, :1] + counted_back
    new = (token - past_length).clamp(0, ids.shape[1] - 1)
    rows = cached.shape[0]
    given = ids.expand(rows, -1).gather(1, new.expand(rows, -1))
    return torch.where(token < past_length, cached, given)
