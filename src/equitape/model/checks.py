"""Checks of inputs and checkpoints: one-sentence errors before any work."""

from collections.abc import Collection

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer, StaticLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..encodings import PositionalEncoding, Positions
from ..encodings.positions import may_read
from ..nn.core import is_quantised
from .configuration import EquitapeConfig

NOT_SCORED = -100


def check_tokens(input_ids: Tensor | None, inputs_embeds: Tensor | None) -> None:
    """Require exactly one of the two."""
    if (input_ids is None) == (inputs_embeds is None):
        given = "neither" if input_ids is None else "both"
        raise ValueError(f"Give exactly one of input_ids and inputs_embeds; {given} was given.")
    if input_ids is not None:
        name, tokens, letters, fits = "input_ids", input_ids, "[B, N]", input_ids.dtype in (torch.long, torch.int)
    else:
        assert inputs_embeds is not None
        name, tokens, letters, fits = "inputs_embeds", inputs_embeds, "[B, N, C]", inputs_embeds.is_floating_point()
    if tokens.dim() != letters.count(",") + 1:
        raise ValueError(f"{name} has shape {list(tokens.shape)}; it must be {letters}.")
    if not fits:
        raise ValueError(
            f"{name} is {tokens.dtype}; it must be {'integer' if letters == '[B, N]' else 'floating point'}."
        )
    if 0 in tokens.shape[:2]:
        what = "tokens" if tokens.shape[1] == 0 else "rows"
        raise ValueError(f"{name} has no {what}; give at least one.")


def check_labels(labels: Tensor, vocab_size: int) -> None:
    """Require ids of the vocabulary, or -100, which is not scored. Only on the CPU, as below."""
    if labels.device.type != "cpu" or not may_read() or not labels.numel():
        return
    wrong = labels[(labels != NOT_SCORED) & ((labels < 0) | (labels >= vocab_size))]
    if len(wrong):
        raise ValueError(
            f"labels contains {int(wrong[0])}; the model's vocabulary has the ids 0 to {vocab_size - 1}, and -100 "
            f"marks tokens that are not scored."
        )


def check_vocabulary(input_ids: Tensor, vocab_size: int) -> None:
    """Require an embedding for every id. Only on the CPU: reading values of another device waits for it."""
    if input_ids.device.type != "cpu" or not may_read() or not input_ids.numel():
        return
    smallest, largest = (int(bound) for bound in input_ids.aminmax())
    if smallest < 0 or largest >= vocab_size:
        raise ValueError(
            f"input_ids contains {smallest if smallest < 0 else largest}; the model's vocabulary has the ids 0 to "
            f"{vocab_size - 1}. Use the tokenizer that the model was trained with."
        )


def check_shape(name: str, ids: Tensor, x: Tensor) -> None:
    """Require one number per token: [B, N] or [1, N]."""
    batch, num_tokens = x.shape[:2]
    if ids.dim() != 2 or ids.shape[0] not in (1, batch) or ids.shape[1] != num_tokens:
        raise ValueError(
            f"{name} has shape {list(ids.shape)}; it must be [{batch}, {num_tokens}] or [1, {num_tokens}], one number "
            f"per token."
        )


def check_ids(name: str, ids: Tensor, x: Tensor, limit: str) -> None:
    """Require one non-negative integer per token. limit: the end of the error if one is negative."""
    check_shape(name, ids, x)
    if ids.is_floating_point():
        raise ValueError(f"{name} is {ids.dtype}; it must be integer, use torch.long.")
    if may_read() and bool((ids < 0).any()):
        raise ValueError(f"{name} contains {int(ids.min())}; {limit}.")


def check_position_ids(position_ids: Tensor | None, x: Tensor) -> None:
    """Require [B, N] or [1, N] non-negative integers."""
    if position_ids is not None:
        check_ids("position_ids", position_ids, x, "ids start at 0")


def check_segments(segment_ids: Tensor | None, x: Tensor, past: Cache | None) -> None:
    """Require [B, N] without a cache, since no single sequence of a packed row could continue."""
    if segment_ids is None:
        return
    check_shape("segment_ids", segment_ids, x)
    if past is not None:
        raise ValueError(
            "segment_ids marks packed sequences, which a cache cannot continue; do not pass past_key_values."
        )


def check_jumps(position_jumps: Tensor | None, x: Tensor, past: Cache | None) -> None:
    """Require [B, N] non-negative integers without a cache, whose continuation would not know the jumps."""
    if position_jumps is None:
        return
    check_ids("position_jumps", position_jumps, x, "jumps must be 0 or more")
    if past is not None:
        raise ValueError("position_jumps is for training on full rows; do not pass past_key_values.")


def counts_back(encoding: PositionalEncoding) -> bool:
    """Whether an encoding takes the tokens of a cache to have consecutive ids."""
    return encoding.needs_extent or (encoding.adds_bias and encoding.reads_ids)


def leaves_gaps(encoding: PositionalEncoding, positions: Positions) -> bool:
    """Whether given ids or jumps leave gaps that an encoding could not see in a cache, where it counts ids back."""
    # a single token leaves none, and reading values of a device in every step would take time
    if not counts_back(encoding) or not may_read() or positions.counts is None or positions.ids.shape[1] == 1:
        return False
    ahead = positions.ids - positions.counts
    first, last = ahead, ahead
    if positions.valid is not None:
        far = torch.iinfo(ahead.dtype).max
        first, last = ahead.masked_fill(~positions.valid, far), ahead.masked_fill(~positions.valid, -far)
    return bool((first.amin(-1) < last.amax(-1)).any())


def check_cached_ids(encoding: PositionalEncoding, gaps: bool, past: Cache | None) -> None:
    """Raise ValueError for ids with gaps in a cache if the encoding counts those of cached tokens back."""
    if gaps and past is not None:
        raise ValueError(
            f"position_ids are not consecutive, but encoding {encoding.kind!r} takes cached tokens to have consecutive "
            f"ids, padding not counted; pass consecutive ids, or no cache."
        )


def check_mask(attention_mask: object, x: Tensor, past: Cache | None, has_segments: bool) -> None:
    """Require 2D over all tokens, or 4D."""
    if not isinstance(attention_mask, Tensor):
        return
    batch, num_tokens = x.shape[:2]
    shape = list(attention_mask.shape)
    if attention_mask.dim() == 4:
        if has_segments:
            raise ValueError("A 4D attention_mask already defines which tokens see which; do not pass segment_ids.")
        if shape[0] not in (1, batch) or shape[2] != num_tokens:
            raise ValueError(
                f"attention_mask has shape {shape}; a 4D mask must be [{batch}, 1, {num_tokens}, keys], with all "
                f"queries and keys of this call."
            )
        return
    seen = past.get_seq_length() if past is not None else 0
    expected = f"[{batch}, {num_tokens}]"
    if attention_mask.dim() == 2 and shape[0] == batch:
        if isinstance(seen, Tensor):
            # the length of a static cache is on the device; its mask covers at least this call
            if shape[1] >= num_tokens:
                return
        elif shape[1] == seen + num_tokens or (
            past is not None and past.is_compileable and shape[1] >= seen + num_tokens
        ):
            return
    if not isinstance(seen, Tensor) and seen:
        expected = f"[{batch}, {seen + num_tokens}], the {seen} cached tokens included"
    raise ValueError(f"attention_mask has shape {shape}; it must be {expected}, 1 for tokens and 0 for padding.")


def check_cache(encoding: PositionalEncoding, past: Cache | None, local: PositionalEncoding | None = None) -> None:
    """Raise ValueError for a cache if the encoding cannot continue from cached keys. local: that of other layers."""
    if past is not None and encoding.cache_refusal is not None:
        raise ValueError(
            f"Encoding {encoding.kind!r} cannot use a cache: {encoding.cache_refusal}, or pass use_cache=False."
        )
    if past is not None and encoding.keeps_sums and not holds_plain_keys(past):
        raise ValueError(
            f"Encoding {encoding.kind!r} reads running sums from cached keys, which {type(past).__name__} keeps "
            f"quantised or on another device; use a dynamic or a static cache."
        )
    if past is not None and is_quantised(past):
        for each in (encoding, local):
            if each is not None and each.keeps_numbers:
                raise ValueError(
                    f"Encoding {each.kind!r} keeps exact numbers in cached keys, which {type(past).__name__} would "
                    f"round; use a dynamic, a static or an offloaded cache."
                )


def check_cache_width(encoding: PositionalEncoding, past: Cache | None, local_layers: Collection[int] = ()) -> None:
    """Require cached values to contain the encoding's positional state, if any: those of a learned prefix do not.

    local_layers: those that have another encoding.
    """
    columns = enumerate(encoding.value_columns)
    widened = next((index for index, extra in columns if extra and index not in local_layers), None)
    if past is None or widened is None or widened >= len(past.layers):
        return
    layer, expected = past.layers[widened], encoding.geometry.head_dim + encoding.value_columns[widened]
    values = getattr(layer, "values", None)
    if "Quantized" in type(layer).__name__ or not isinstance(values, Tensor) or values.dim() != 4:
        return
    if values.numel() and values.shape[-1] != expected:
        raise ValueError(
            f"The cache has values of width {values.shape[-1]}, but encoding {encoding.kind!r} needs {expected}: its "
            f"values carry positional state. Prefix tuning makes such caches; use LoRA or prompt tuning instead."
        )


def holds_plain_keys(past: Cache) -> bool:
    """Whether every layer holds its keys as one tensor on the model's device."""
    if getattr(past, "offloading", False):
        return False
    return all(isinstance(layer, (DynamicLayer, StaticLayer)) for layer in past.layers) and not is_quantised(past)


def check_paged_cache(encoding: PositionalEncoding, implementation: str | None) -> None:
    """Raise ValueError if continuous batching (`generate_batch`) cannot use this encoding or attention."""
    if encoding.cache_refusal is not None:
        raise ValueError(
            f"Encoding {encoding.kind!r} cannot use continuous batching (generate_batch): {encoding.cache_refusal}."
        )
    if implementation not in ("eager", "sdpa"):
        raise ValueError(
            f"Continuous batching (generate_batch) needs attention 'sdpa' or 'eager', not {implementation!r}; call "
            f"model.set_attn_implementation('sdpa')."
        )


def check_backend(encoding_kind: str, backends: tuple[str, ...], requested: str | None) -> None:
    """Raise ValueError for an attention implementation that the encoding does not support."""
    known = requested == "eager" or requested in ALL_ATTENTION_FUNCTIONS
    known = known or str(requested).startswith(("flash_attention", "paged|"))
    if known and requested not in backends:
        raise ValueError(
            f"Attention implementation {requested!r} does not support encoding {encoding_kind!r}; use one of "
            f"{', '.join(repr(name) for name in backends)}."
        )


def check_target(path: object) -> None:
    """Raise ValueError for a GGUF file as the place to save a model."""
    if str(path).endswith(".gguf"):
        raise ValueError(
            f"Equitape models cannot be saved as {str(path)!r}: no architecture of llama.cpp passes a positional "
            f"state from block to block. Give a folder, and serve it with vLLM, generate_batch or generate."
        )


def check_loading(missing: list[str], unexpected: list[str], required: str | tuple[str, ...] = "") -> None:
    """Require every weight with a prefix in `required`, and none of another encoding."""
    lost = [name for name in missing if name.startswith(required)]
    foreign = [name for name in unexpected if ".encoding." in f".{name}"]
    if lost:
        raise ValueError(
            f"The checkpoint lacks {len(lost)} of the model's weights: {name_some(lost)}. They would be random. If it "
            f"was made with another encoding or other sizes, load it with its own configuration; otherwise its files "
            f"are incomplete."
        )
    if foreign:
        raise ValueError(
            f"The checkpoint has {len(foreign)} weights of another encoding: {name_some(foreign)}. Load it with its "
            f"own configuration."
        )


def name_some(names: list[str], most: int = 5) -> str:
    """The first few names and the number of others."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(repr(name) for name in names[:most]) + more


def check_softcap(attn_implementation: str | None) -> str:
    """The implementation of attention that bounds scores, which is the default then; ValueError for any other."""
    if attn_implementation not in (None, "eager"):
        raise ValueError(
            f"This model bounds its attention scores (attention_softcap), which {attn_implementation!r} cannot; use "
            f"attn_implementation='eager'."
        )
    return "eager"


def check_uniform_layers(config: EquitapeConfig, what: str, instead: str) -> None:
    """Raise ValueError for models whose attention a way of running them does not know.

    what: names that way. instead: what to do.
    """
    for name in ("attention_softcap", "local_encoding"):
        if getattr(config, name) is not None:
            raise ValueError(f"{what} does not support models with {name}; {instead}.")
