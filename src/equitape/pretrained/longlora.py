"""LongLoRA's shifted sparse attention for training on long rows (arXiv 2309.12307).

Tokens attend only within their group. The second half of the query heads shifts the group boundaries by half a group,
so that information passes between groups. The first group of these heads is shorter; the paper instead rolls the row,
which moves its first tokens behind its last ones.

Shapes: B batch, N tokens, H query heads, G key-value heads, D head dimension, E width of the value.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from ..encodings.base import ENCODINGS
from ..model import EquitapeConfig
from ..model.masks import BuildMask
from ..nn.core import AttentionMask, PlainAttention
from ..nn.masks import MaskFunction

Heads = tuple[Tensor, Tensor, Tensor]
"""Query [B, H, N, D], key [B, G, N, D] and value [B, G, N, E]."""


@dataclass(frozen=True)
class ShiftedSparseAttention:
    """The attention of one training run, for `EquitapeModel.training_attention`."""

    group_size: int
    """Tokens per group."""

    def check(self, config: EquitapeConfig) -> None:
        """Raise ValueError for models that cannot be trained this way."""
        assert isinstance(config.encoding, dict)
        kind = config.encoding["kind"]
        if ENCODINGS[kind].adds_bias:
            raise ValueError(
                f"Shifted sparse attention cannot be used with encoding {kind!r}, which biases scores; use 'rope' or "
                f"'tape'."
            )
        if self.group_size < 2 or config.num_attention_heads < 2:
            raise ValueError(
                f"group_size is {self.group_size} with {config.num_attention_heads} heads; half of the heads are "
                f"shifted by half a group, so both must be 2 or more."
            )

    def __call__(self, build: BuildMask, config: EquitapeConfig) -> AttentionMask:
        """The mask of one layer type, or the attention itself if it needs none."""
        first, second = (build(own_group(self.group_size, shift)) for shift in (0, self.group_size // 2))
        if first is None:
            return AttentionMask(attend=GroupsAsRows(self.group_size))
        if isinstance(first, BlockMask) and isinstance(second, BlockMask):
            return AttentionMask(attend=HalvesOfHeads(first, second))
        assert isinstance(first, Tensor) and isinstance(second, Tensor)
        half = config.num_attention_heads // 2
        rest = config.num_attention_heads - half
        return AttentionMask(torch.cat((first.expand(-1, half, -1, -1), second.expand(-1, rest, -1, -1)), dim=1))


def own_group(size: int, shift: int) -> MaskFunction:
    """Tokens attend only within their group. A shift moves the boundaries, which shortens the first group."""

    def mask(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (query + shift) // size == (key + shift) // size

    return mask


@dataclass(frozen=True)
class HalvesOfHeads:
    """One block mask for each half of the query heads: [B, N, H, E].

    Two calls, since one mask with a head axis would be built for every head.
    """

    first: BlockMask
    second: BlockMask

    def __call__(self, attend: PlainAttention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        halves = zip(halves_of_heads(query, key, value), (self.first, self.second), strict=True)
        return torch.cat([attend(*heads, mask) for heads, mask in halves], dim=2)


@dataclass(frozen=True)
class GroupsAsRows:
    """Shifted sparse attention of plain rows without a mask: groups become rows of a batch. [B, N, H, E]."""

    size: int

    def __call__(self, attend: PlainAttention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        halves = zip(halves_of_heads(query, key, value), (0, self.size // 2), strict=True)
        return torch.cat([self._attend(attend, *heads, shift) for heads, shift in halves], dim=2)

    def _attend(self, attend: PlainAttention, query: Tensor, key: Tensor, value: Tensor, shift: int) -> Tensor:
        batch, num_tokens, size = query.shape[0], query.shape[2], self.size
        first = min(size - shift, num_tokens) if shift else 0
        # torch.compile does not support divmod of dynamic lengths
        count, last = (num_tokens - first) // size, (num_tokens - first) % size
        attended = []
        start = 0
        for groups, length in ((1, first), (count, size), (1, last)):
            end = start + groups * length
            if length == 1:
                # a single token attends to itself with weight 1, which dropout must not change
                own = value[:, :, start:end].repeat_interleave(query.shape[1] // key.shape[1], dim=1)
                attended.append(own.transpose(1, 2))
            elif end > start:
                q, k, v = (
                    each[:, :, start:end].unflatten(2, (groups, length)).transpose(1, 2).flatten(0, 1)
                    for each in (query, key, value)
                )
                attended.append(attend(q, k, v, None).unflatten(0, (batch, groups)).flatten(1, 2))
            start = end
        return torch.cat(attended, dim=1)


def halves_of_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Heads, Heads]:
    """The two halves of the query heads, each with the keys and values they read."""
    half, ratio = query.shape[1] // 2, query.shape[1] // key.shape[1]
    if half % ratio:
        # the query heads of one key-value head are in both halves
        key, value, ratio = key.repeat_interleave(ratio, dim=1), value.repeat_interleave(ratio, dim=1), 1
    border = half // ratio
    return (
        (query[:, :half], key[:, :border], value[:, :border]),
        (query[:, half:], key[:, border:], value[:, border:]),
    )
