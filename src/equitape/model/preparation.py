"""What blocks need before a forward pass: positions, masks and the cache, for each of the three ways to run a model.

Plain calls use transformers' caches or none, paged calls serve many requests at once (paged.py), and split calls hold a
part of every row (context_parallel.py).
"""

import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from ..encodings import Positions
from ..encodings.positions import default_ids
from ..nn.core import AttentionMask
from . import checks
from .context_parallel import check_call, place, refuse_torchs_split, ring_mask
from .masks import build_masks, build_positions, seen_tokens, shows_padding
from .paged import PagedCache

if TYPE_CHECKING:
    from .modeling import EquitapeModel


class Given(NamedTuple):
    """What the caller gave to `EquitapeModel.forward` besides tokens."""

    attention_mask: Tensor | None
    position_ids: Tensor | None
    past_key_values: Cache | None
    use_cache: bool | None
    segment_ids: Tensor | None
    position_jumps: Tensor | None


class Prepared(NamedTuple):
    """Positions, the mask of each type of layer, and the cache that blocks write to."""

    positions: Positions
    masks: dict[str, AttentionMask]
    cache: Any


def prepare(model: "EquitapeModel", x: Tensor, given: Given, kwargs: dict[str, Any]) -> Prepared:
    """Check what was given and prepare the way of running it asks for. x: embedded tokens [B, N, C].

    kwargs: further arguments of the call; those of a paged cache are taken out.
    """
    paged = kwargs.pop("cache", None)
    if paged is None:
        checks.check_position_ids(given.position_ids, x)
    checks.check_segments(given.segment_ids, x, given.past_key_values)
    checks.check_jumps(given.position_jumps, x, given.past_key_values)
    if paged is not None:
        return _prepare_paged(model, x, given, paged, kwargs)
    if model.shards is not None:
        return _prepare_split(model, x, given)
    return _prepare_plain(model, x, given)


def _prepare_paged(model: "EquitapeModel", x: Tensor, given: Given, paged: Any, kwargs: dict[str, Any]) -> Prepared:
    assert given.position_ids is not None
    checks.check_paged_cache(model.encoding, model.config._attn_implementation)
    cache = PagedCache(paged, kwargs, model.config)
    positions = cache.positions(model.encoding, given.position_ids.long())
    scaling = common_scale(model, "Continuous batching (generate_batch)", "use generate")
    return Prepared(positions, cache.masks(model.encoding, positions.ids, x.dtype, scaling), cache)


def _prepare_split(model: "EquitapeModel", x: Tensor, given: Given) -> Prepared:
    assert model.shards is not None
    check_call(given.attention_mask, given.segment_ids, given.past_key_values, model.training_attention is not None)
    checks.check_uniform_layers(model.config, "Splitting rows over processes", "keep rows whole")
    positions = place(model.encoding, x, given.position_ids, given.position_jumps, model.shards)
    scaling = common_scale(model, "Splitting rows over processes", "keep rows whole")
    return Prepared(positions, {"full_attention": ring_mask(model.shards, scaling)}, None)


def _prepare_plain(model: "EquitapeModel", x: Tensor, given: Given) -> Prepared:
    encoding, cache = model.encoding, given.past_key_values
    if not torch.compiler.is_compiling():
        refuse_torchs_split()
    checks.check_mask(given.attention_mask, x, cache, given.segment_ids is not None)
    checks.check_cache(encoding, cache, model.local_encoding)
    checks.check_cache_width(encoding, cache, model.local_layers)
    positions = build_positions(
        encoding, x, given.attention_mask, given.position_ids, given.segment_ids, cache, given.position_jumps
    )
    checks.check_cached_ids(encoding, cache is not None and _leaves_gaps(model, x, given, positions), cache)
    hook = model.training_attention if model.training else None
    masks = build_masks(model.config, encoding, x, given.attention_mask, positions, cache, model.training, hook)
    if given.use_cache and cache is None and positions.segments is None and encoding.cache_refusal is None:
        if not _leaves_gaps(model, x, given, positions):
            cache = DynamicCache(config=model.config)
        elif not model.training:
            warnings.warn(
                f"position_ids are not consecutive, so this call makes no cache: encoding {encoding.kind!r} could not "
                f"continue from it. Pass use_cache=False if you need none.",
                stacklevel=4,
            )
    return Prepared(positions, masks, cache)


def _leaves_gaps(model: "EquitapeModel", x: Tensor, given: Given, positions: Positions) -> bool:
    """Whether given ids or jumps leave gaps that the encoding could not see in a cache.

    Training without a cache counts as such: nothing continues from it, and to look would wait for the device.
    """
    encoding, cache, mask = model.encoding, given.past_key_values, given.attention_mask
    if (given.position_ids is None and given.position_jumps is None) or not checks.counts_back(encoding):
        return False
    if cache is None and model.training:
        return True
    if cache is None and mask is not None and (isinstance(mask, dict) or mask.dim() == 4) and shows_padding(mask):
        # without a cache, tokens are counted by their ids if the mask was prepared
        seen = seen_tokens(encoding, x, mask, first_key=0)
        positions = positions._replace(counts=default_ids(x.shape[1], 0, seen, x.device), valid=seen)
    return checks.leaves_gaps(encoding, positions)


def common_scale(model: "EquitapeModel", what: str, instead: str) -> float:
    """The softmax scale of all blocks, for a way to run them that knows only one. what, instead: for the error."""
    blocks = range(len(model.layers))
    found = {model.config.softmax_scale(block, model.encoding_of(block).score_scale) for block in blocks}
    if len(found) > 1:
        raise ValueError(
            f"{what} does not support models whose layers scale their scores differently, as with YaRN next to layers "
            f"without positions; {instead}."
        )
    return found.pop()
