"""Positions and attention masks per layer type, from the caller's mask, ids, segments and cache."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from transformers import Cache
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from ..encodings import PositionalEncoding, Positions
from ..encodings.positions import (
    add_jumps,
    default_ids,
    ids_within_runs,
    index_runs,
    key_ids,
    last_key,
    may_read,
    origin_with_cache,
    runs_from_restarts,
    sequence_extent,
)
from ..nn.continued import is_right
from ..nn.core import AttentionMask
from ..nn.masks import MaskFunction, behind, mask_function, materialise
from .configuration import EquitapeConfig

BLOCK_MASK_TOKENS = 512
"""Shorter rows are faster with a dense mask."""
MAX_MASK_BYTES = 2**26
"""An encoding that biases scores gets a larger mask as a function, which makes it for some queries."""

OwnMask = Tensor | BlockMask | None
"""The caller's mask of one layer type."""
Mask = OwnMask | dict[str, Any]
BuildMask = Callable[[MaskFunction | None], Tensor | BlockMask | None]
"""The mask of one layer type, narrowed by a further mask function; None if causal sdpa needs no mask: the further
function is then up to the caller.
"""
AttentionHook = Callable[[BuildMask, EquitapeConfig], AttentionMask]
"""Makes the attention mask of one layer type, for training with restricted attention."""


def build_positions(
    encoding: PositionalEncoding,
    x: Tensor,
    attention_mask: Mask,
    position_ids: Tensor | None,
    segment_ids: Tensor | None,
    past: Cache | None,
    position_jumps: Tensor | None = None,
) -> Positions:
    """Ids and sequences of the tokens x [B, N, C]."""
    num_tokens = x.shape[1]
    past_length = past.get_seq_length() if past is not None else 0
    padding = valid = runs = None
    if isinstance(attention_mask, Tensor) and attention_mask.dim() == 2:
        padding = attention_mask.to(device=x.device, dtype=torch.bool)
        valid = padding[:, torch.arange(num_tokens, device=x.device) + past_length]
    if segment_ids is not None:
        runs = index_runs(segment_ids.expand(x.shape[0], -1), valid)
    elif position_ids is not None and attention_mask is None and past is None:
        runs = runs_from_restarts(position_ids)
        if may_read() and not bool(runs.any()):
            runs = None
    if runs is not None:
        counts = ids_within_runs(runs)
    elif position_ids is None or padding is not None or attention_mask is None:
        counts = default_ids(num_tokens, past_length, padding, x.device)
    else:
        counts, valid = count_by_mask(encoding, x, attention_mask, position_ids, past)
    ids = counts if position_ids is None else position_ids
    if position_jumps is not None:
        ids = add_jumps(ids, position_jumps, runs)
    positions = Positions(ids=ids, segments=runs, valid=valid, counts=counts)
    if encoding.keeps_sums and past is not None:
        first_key = past.get_mask_sizes(num_tokens, 0)[1]
        seen = seen_tokens(encoding, x, attention_mask, first_key)
        if seen is not None:
            valid = seen[:, torch.arange(num_tokens, device=x.device) + past_length]
        positions = positions._replace(valid=valid, last_key=last_key(past_length, seen, x.device))
    if encoding.needs_extent:
        origin, span = sequence_extent(ids, runs, valid)
        if past is not None:
            seen = seen_tokens(encoding, x, attention_mask, oldest_key(attention_mask, num_tokens, past))
            origin = origin_with_cache(ids, past_length, seen, origin)
        positions = positions._replace(origin=origin, span=span)
    return positions


def count_by_mask(
    encoding: PositionalEncoding, x: Tensor, attention_mask: Mask, position_ids: Tensor, past: Cache | None
) -> tuple[Tensor, Tensor | None]:
    """Ids that leave out the padding of a prepared mask, and which new tokens are real.

    The given ids where it does not show padding: without a cache, as a block mask, or with a window in all layers.
    """
    if past is None or not shows_padding(attention_mask):
        return position_ids, None
    num_tokens, past_length = x.shape[1], past.get_seq_length()
    seen = seen_tokens(encoding, x, attention_mask, oldest_key(attention_mask, num_tokens, past))
    valid = None if seen is None else seen[:, torch.arange(num_tokens, device=x.device) + past_length]
    return default_ids(num_tokens, past_length, seen, x.device), valid


def shows_padding(attention_mask: Mask) -> bool:
    """Whether `seen_tokens` can read a prepared mask of tokens without a cache, or of a layer that keeps all keys."""
    masks = attention_mask if isinstance(attention_mask, dict) else {"full_attention": attention_mask}
    return "full_attention" in masks and not isinstance(masks["full_attention"], BlockMask)


def oldest_key(attention_mask: Mask, num_tokens: int, past: Cache) -> int:
    """Number of oldest tokens that the mask which `seen_tokens` reads leaves out: their layer has dropped them."""
    if isinstance(attention_mask, dict) and "full_attention" in attention_mask:
        return 0
    first_key: int = past.get_mask_sizes(num_tokens, 0)[1]
    return first_key


def seen_tokens(
    encoding: PositionalEncoding, x: Tensor, attention_mask: Mask, first_key: int, windowed: bool = False
) -> Tensor | None:
    """Which cached and new tokens are real: [B, tokens] bool, or None without padding.

    For encodings that count cached tokens. first_key: number of oldest tokens that the cache has dropped. windowed: the
    mask is that of a layer with a window, which hides old keys from the last token.
    """
    mask, slides = attention_mask, False
    if isinstance(mask, dict):
        slides = "full_attention" not in mask
        mask = next(iter(mask.values())) if slides else mask["full_attention"]
    if mask is None:
        return None
    hides = (encoding.needs_extent and first_key) or (encoding.keeps_sums and (first_key or slides))
    if isinstance(mask, BlockMask) or (mask.dim() == 4 and hides):
        raise ValueError(
            f"Encoding {encoding.kind!r} counts cached tokens by the padding mask, which the prepared mask of this "
            f"cache does not show; use a dynamic cache, or attention 'sdpa' without a sliding window."
        )
    if mask.dim() == 2:
        return mask.to(device=x.device, dtype=torch.bool)
    # a prepared 4D mask: tokens visible to the last one, or with a window to any, are neither padding nor future
    rows = mask[:, 0] if windowed else mask[:, 0, -1:]
    row = (rows if rows.dtype == torch.bool else rows > torch.finfo(rows.dtype).min / 2).any(1)
    return torch.nn.functional.pad(row, (first_key, 0), value=True)


class Call(NamedTuple):
    """What the masks of all layer types of one forward pass depend on."""

    config: EquitapeConfig
    encoding: PositionalEncoding
    x: Tensor
    """[B, N, C]."""
    positions: Positions
    past: Cache | None
    training: bool

    @property
    def uses_sdpa(self) -> bool:
        return self.config._attn_implementation == "sdpa"


def build_masks(
    config: EquitapeConfig,
    encoding: PositionalEncoding,
    x: Tensor,
    attention_mask: Mask,
    positions: Positions,
    past: Cache | None,
    training: bool = False,
    hook: AttentionHook | None = None,
) -> dict[str, AttentionMask]:
    """What each layer type attends to.

    training: padding on the right needs no mask, since nothing reads the logits there. hook: makes masks instead of
    the plain ones, in training.
    """
    if past is not None and not past.is_compileable and past.get_seq_length() == 0:
        # nothing is cached yet: the first call needs the same mask as without a cache
        past = None
    if hook is not None and past is not None:
        raise ValueError("training_attention needs full sequences; do not pass past_key_values, or call model.eval().")
    call = Call(config, encoding, x, positions, past, training)
    masks = {}
    for kind in dict.fromkeys(config.layer_types):
        own_mask = attention_mask[kind] if isinstance(attention_mask, dict) else attention_mask
        masks[kind] = _build_layer_mask(call, own_mask, kind, hook)
    return masks


def _build_layer_mask(call: Call, own_mask: OwnMask, kind: str, hook: AttentionHook | None) -> AttentionMask:
    config, encoding, x, positions, past, _ = call
    window = config.sliding_window if kind == "sliding_attention" else None
    if hook is not None:
        return hook(lambda also: _build_mask(call, own_mask, window, True, also), config)
    if continues_plainly(call, own_mask, window) and can_continue(call):
        return AttentionMask(continued=True)
    if encoding.adds_bias and past is None and is_large(call, own_mask):
        return AttentionMask(key_ids=positions.ids, rows=_mask_rows(call, window))
    mask = _build_mask(call, own_mask, window, not encoding.adds_bias)
    if not encoding.adds_bias:
        return AttentionMask(mask)
    if past is None:
        return AttentionMask(mask, positions.ids)
    num_keys, first_key = past.get_mask_sizes(x.shape[1], config.layer_types.index(kind))
    seen = seen_tokens(encoding, x, own_mask, first_key, windowed=window is not None)
    return AttentionMask(mask, key_ids(positions.ids, past.get_seq_length(), first_key, num_keys, seen))


def continues_plainly(call: Call, own_mask: OwnMask, window: int | None) -> bool:
    """Whether several new tokens see all of a growing cache and each other causally, and nothing else matters."""
    past = call.past
    if past is None or past.is_compileable or window is not None or call.encoding.adds_bias or own_mask is not None:
        return False
    return call.uses_sdpa and call.x.shape[1] > 1


def can_continue(call: Call) -> bool:
    """Whether a kernel does so without a mask, in the layers of all widths."""
    config, encoding, x = call.config, call.encoding, call.x
    if not x.is_cuda or call.training or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    assert config.num_key_value_heads is not None and config.head_dim is not None
    heads, width = (config.num_attention_heads, config.num_key_value_heads), config.head_dim
    kinds = set(zip(encoding.key_columns, encoding.value_columns, strict=True))
    return all(is_right(x.device, x.dtype, heads, (width + key, width + value)) for key, value in kinds)


def _build_mask(
    call: Call, own_mask: OwnMask, window: int | None, may_skip: bool, also: MaskFunction | None = None
) -> Tensor | BlockMask | None:
    config, x, positions = call.config, call.x, call.positions
    if isinstance(own_mask, BlockMask) or (own_mask is not None and own_mask.dim() == 4):
        return own_mask
    if call.past is not None:
        create = create_causal_mask if window is None else create_sliding_window_causal_mask
        return create(
            config=config,
            inputs_embeds=x,
            attention_mask=own_mask,
            past_key_values=call.past,
            allow_is_causal_skip=may_skip,
        )
    windowed, padding = _hidden(call, window)
    plain = padding is None and positions.segments is None and windowed is None
    if plain and may_skip and call.uses_sdpa:
        return None
    function = mask_function(positions, x.shape[0], window=windowed, also=also)
    implementation = "flex_attention" if may_skip and prefers_blocks(call) else config._attn_implementation
    return materialise(implementation, function, x, x.shape[1], padding, config)


def is_large(call: Call, own_mask: OwnMask) -> bool:
    """Whether a dense mask has to be made that takes much memory."""
    made = own_mask is None or (isinstance(own_mask, Tensor) and own_mask.dim() == 2)
    return made and call.uses_sdpa and call.x.shape[0] * call.x.shape[1] ** 2 > MAX_MASK_BYTES


def _mask_rows(call: Call, window: int | None) -> Callable[[int, int], Tensor]:
    window, padding = _hidden(call, window)
    function = mask_function(call.positions, call.x.shape[0], window=window)

    def rows(begin: int, end: int) -> Tensor:
        some = None if padding is None else padding[:, :end]
        mask = materialise("sdpa", behind(function, begin), call.x[:, begin:end], end, some, call.config)
        assert isinstance(mask, Tensor)
        return mask

    return rows


def _hidden(call: Call, window: int | None) -> tuple[int | None, Tensor | None]:
    """The window and the padding [B, N] that a mask has to hide, each None if there is nothing to hide."""
    padding = call.positions.valid if call.positions.segments is None else None
    # a mask of ones needs no dense mask; in training neither does right padding, which causality hides from tokens
    if padding is not None and may_read():
        unneeded = padding[:, :-1] | ~padding[:, 1:] if call.training else padding
        if bool(unneeded.all()):
            padding = None
    return window if window is not None and call.x.shape[1] > window else None, padding


def prefers_blocks(call: Call) -> bool:
    """Whether FlexAttention with a block mask is faster than sdpa with a dense one, which triples its time."""
    return call.uses_sdpa and call.x.is_cuda and call.x.shape[1] >= BLOCK_MASK_TOKENS
