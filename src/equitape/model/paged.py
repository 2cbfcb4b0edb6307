"""Continuous batching (`generate_batch`): tokens of many requests in one row, keys and values in transformers' paged
cache.

The cache stores two rows of equal width per token and layer. A key is D + E_k wide and a value D + E_v, so the
rows are [key | end of the value] and [start of the value]: nothing is stored twice.

Shapes: N tokens and K keys of all requests, R requests, H query heads, G key-value heads, D head dimension.
"""

import math
from collections.abc import Callable
from copy import copy
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..encodings import PositionalEncoding, Positions
from ..kernels import reads_pages
from ..nn.backends import HALF_PRECISION, varlen_attention
from ..nn.core import AttentionMask
from .configuration import EquitapeConfig

ARGUMENTS = (
    "read_index", "write_index", "cu_seq_lens_q", "cu_seq_lens_k", "max_seqlen_q", "max_seqlen_k", "max_length_q",
    "max_length_k", "block_table", "logits_indices", "logits_processor_args", "is_causal",
)  # fmt: skip
"""What continuous batching passes to `forward` with its cache, under the names of all supported versions."""


def row_width(config: EquitapeConfig) -> int:
    """Width of one of the two rows that the cache stores per token and layer: a multiple of 8, which kernels need."""
    widths = zip(config.key_cache_dims, config.value_cache_dims, strict=True)
    return max(8 * math.ceil(max(key, (key + value) / 2) / 8) for key, value in widths)


class PagedModel:
    """A model as continuous batching sees it: its configuration describes the rows of the cache.

    Its attention is named like a flash implementation, since those get no dense mask, which grows with the cache.
    """

    def __init__(self, model: Any):
        self.__dict__["model"] = model

    @property
    def config(self) -> EquitapeConfig:
        """The model's configuration with the width of the cache's rows as head dimension."""
        config = copy(self.model.config)
        config.head_dim = row_width(self.model.config)
        config._attn_implementation_internal = "paged|equitape_flash"
        return config

    def eval(self) -> "PagedModel":
        """Put the model into evaluation mode."""
        self.model.eval()
        return self

    def set_attn_implementation(self, *names: Any, **settings: Any) -> None:
        """Do nothing: the model keeps its implementation."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.model, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.model, name)


class PagedCache:
    """The cache and the requests of one forward pass, used like a key-value cache of transformers."""

    def __init__(self, cache: Any, kwargs: dict[str, Any], config: EquitapeConfig):
        self.cache = cache
        self.layer_types = config.layer_types
        self.windows = {"full_attention": None, "sliding_attention": config.sliding_window}
        self.widths = list(zip(config.key_cache_dims, config.value_cache_dims, strict=True))
        self.row_width, self.num_kv_heads = row_width(config), config.geometry.num_kv_heads
        given = {name: kwargs.pop(name, None) for name in ARGUMENTS}
        self.read_index, self.write_index = given["read_index"], given["write_index"]
        self.ends = given["cu_seq_lens_q"].long()
        self.longest = given["max_length_q"] or given["max_seqlen_q"]
        key_ends, longest_keys = given["cu_seq_lens_k"], given["max_length_k"] or given["max_seqlen_k"]
        only = self.layer_types[0]
        self.key_ends = key_ends if isinstance(key_ends, dict) else {only: key_ends}
        self.longest_keys = longest_keys if isinstance(longest_keys, dict) else {only: longest_keys}
        self.layer, self.in_place = 0, False
        # transformers 5.22 selects what belongs to a layer itself
        self.selects = "kwargs" in signature(cache.update).parameters

    def update(self, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Store the new tokens of a layer, [1, G, N, width]; returns all keys and values, [1, G, K, width].

        Where the kernel reads the cache in place, it returns the cache: two tensors [1, G, all rows, row width].
        """
        key_width, value_width = self.widths[layer]
        self.layer = layer
        head, tail = value[..., : self.row_width], value[..., self.row_width :]
        first = self._widen(torch.cat((key, tail), dim=-1) if tail.shape[-1] else key)
        second = self._widen(head)
        if self._reads_in_place(layer):
            self._exchange(first, second, layer, [index[:0] for index in self.read_index], self.write_index)
            storage = self._storage(layer)
            return storage[0].transpose(0, 1)[None], storage[1].transpose(0, 1)[None]
        first, second = self._exchange(first, second, layer, self.read_index, self.write_index)
        keys, values = first[..., :key_width], second[..., :value_width]
        if tail.shape[-1]:
            values = torch.cat((values, first[..., key_width : key_width + tail.shape[-1]]), dim=-1)
        return keys, values

    def last_key(self, layer: int) -> Tensor | None:
        """The last cached key of each token's request: [1, G, N, width], zeros without one; None if none is cached."""
        group = self._group(layer)
        read = self.read_index[group]
        if not read.numel():
            return None
        kind = self.layer_types[layer]
        held = self._held(kind)
        place = self.key_ends[kind][:-1] + held - 1
        rows = list(self.read_index)
        rows[group] = torch.where(held > 0, read[place.clamp(min=0)], 0)
        nothing = torch.empty(1, self.num_kv_heads, 0, self.row_width, device=read.device, dtype=self.cache.dtype)
        key = self._exchange(nothing, nothing, layer, rows, [index[:0] for index in self.write_index])[0]
        key = torch.where((held > 0)[:, None], key[..., : self.widths[layer][0]], 0)
        return key[:, :, self.requests.clamp(max=key.shape[2] - 1)]

    @property
    def requests(self) -> Tensor:
        """The request of each new token: [N]; padding comes after the last request."""
        return self._owners(self.ends, self._count())

    def positions(self, encoding: PositionalEncoding, ids: Tensor) -> Positions:
        """Positions of the new tokens. Every request starts at 0."""
        origin = torch.zeros_like(ids[:, :1]) if encoding.needs_extent else None
        last_key = self._first_ids(ids) - 1 if encoding.keeps_sums else None
        return Positions(ids=ids, segments=self.requests[None], origin=origin, last_key=last_key)

    def masks(
        self, encoding: PositionalEncoding, ids: Tensor, dtype: torch.dtype, scaling: float
    ) -> dict[str, AttentionMask]:
        """What each type of layer attends to."""
        masks = {}
        self.in_place = not encoding.adds_bias and reads_pages(torch.empty(0, device=ids.device, dtype=dtype))
        for kind in dict.fromkeys(self.layer_types):
            if self._reads_in_place(self.layer_types.index(kind)):
                masks[kind] = self._paged(kind, scaling)
            elif ids.is_cuda and dtype in HALF_PRECISION and not encoding.adds_bias:
                masks[kind] = self._packed(kind, scaling)
            else:
                masks[kind] = self._dense(kind, encoding, ids)
        return masks

    def _paged(self, kind: str, scaling: float) -> AttentionMask:
        # Triton may be missing
        from ..kernels.triton_paged import paged_attention

        ends, key_ends = self.ends.int(), self.key_ends[kind].int()

        def attend(plain: Callable, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            # layers of one type may lie in several groups, each with rows of its own
            group = self._group(self.layer)
            # without anything to read, the keys are the new tokens
            rows = self.read_index[group] if self.read_index[group].numel() else self.write_index[group]
            first, second = (storage[0].transpose(0, 1) for storage in (key, value))
            widths = self.widths[self.layer]
            tokens = query[0].transpose(0, 1)
            return paged_attention(tokens, first, second, rows, ends, key_ends, widths, scaling)[None]

        return AttentionMask(attend=attend)

    def _packed(self, kind: str, scaling: float) -> AttentionMask:
        ends, key_ends = self.ends.int(), self.key_ends[kind].int()

        def attend(plain: Callable, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            lengths = (self.longest, self.longest_keys[kind])
            return varlen_attention(query, key, value, (ends, key_ends), lengths, scaling, self.windows[kind])

        return AttentionMask(attend=attend)

    def _dense(self, kind: str, encoding: PositionalEncoding, ids: Tensor) -> AttentionMask:
        """Each token sees its own request up to itself."""
        key_ends, held = self.key_ends[kind].long(), self._held(kind)
        reads = self.read_index[self._group(self.layer_types.index(kind))].numel()
        last = len(held) - 1
        owner, key_owner = self.requests, self._owners(key_ends, reads or self._count())
        own, key_own = owner.clamp(max=last), key_owner.clamp(max=last)
        place = torch.arange(len(owner), device=ids.device) - self.ends[own] + held[own]
        key_place = torch.arange(len(key_owner), device=ids.device) - key_ends[key_own]
        distance = place[:, None] - key_place
        visible = (owner[:, None] == key_owner) & (distance >= 0)
        window = self.windows[kind]
        if window is not None:
            visible &= distance < window
        mask = visible[None, None]
        if not encoding.adds_bias:
            return AttentionMask(mask)
        return AttentionMask(mask, (self._first_ids(ids) - held)[key_own][None] + key_place)

    def _exchange(
        self, first: Tensor, second: Tensor, layer: int, read: list[Tensor], write: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Write rows of a layer, [1, G, N, width], and read others: [1, G, K, width]."""
        if not self.selects:
            rows = self.cache.update(first, second, layer, read, write)
            return rows[0].transpose(0, 1)[None], rows[1].transpose(0, 1)[None]
        kwargs = {
            "read_index": read,
            "write_index": write,
            "cu_seq_lens_k": self.key_ends,
            "max_length_k": self.longest_keys,
        }
        return self.cache.update(first, second, layer, kwargs)

    def _group(self, layer: int) -> int:
        """The index of a layer among the cache's groups."""
        if self.selects:
            return self.cache.layer_to_allocator[layer].index
        return self.cache.layer_index_to_group_indices[layer][0]

    def _first_ids(self, ids: Tensor) -> Tensor:
        """The id of each request's first new token: [R]."""
        return ids[0, self.ends[:-1].clamp(max=ids.shape[1] - 1)]

    def _reads_in_place(self, layer: int) -> bool:
        """Whether attention reads the cache itself. A sliding window's rows are overwritten before they are read."""
        return self.in_place and self.layer_types[layer] == "full_attention"

    def _storage(self, layer: int) -> tuple[Tensor, Tensor]:
        """The two rows of all tokens of a layer: [rows, G, row width]."""
        if self.selects:
            return self.cache.layer_to_allocator[layer]._kv_token_views[layer]
        place = self.cache.layer_index_to_group_indices[layer][1]
        return self.cache.key_cache[place], self.cache.value_cache[place]

    def _widen(self, rows: Tensor) -> Tensor:
        return pad(rows, (0, self.row_width - rows.shape[-1]))

    def _count(self) -> int:
        """Number of new tokens, padding included."""
        return self.write_index[0].shape[0]

    def _held(self, kind: str) -> Tensor:
        """Number of cached keys of each request that a type of layer reads: [R]."""
        return self.key_ends[kind].long().diff() - self.ends.diff()

    @staticmethod
    def _owners(ends: Tensor, count: int) -> Tensor:
        index = torch.arange(count, device=ends.device)
        return torch.searchsorted(ends, index, right=True) - 1
