"""Which tokens attend to which: causality, windows, packed sequences and padding as one mask.

Shapes: B batch, N tokens, K keys, A axes.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    packed_sequence_mask_function,
    padding_mask_function,
    sliding_window_causal_mask_function,
)

from ..encodings import Positions

MaskFunction = Callable[[Any, Any, Any, Any], Any]
"""transformers' form of a mask: (batch, head, query index, key index) -> bool."""


def mask_function(
    positions: Positions,
    batch: int,
    *,
    causal: bool = True,
    window: int | None = None,
    also: MaskFunction | None = None,
) -> MaskFunction:
    """The mask of tokens that attend to each other. also: narrows it further.

    window: a causal token sees the last `window` tokens, itself included; otherwise a token sees those fewer than
    `window` tokens away. With several axes, the distance is the largest along any axis.
    """
    functions: list[MaskFunction] = []
    several_axes = positions.ids.dim() == 3
    if window is not None and causal and not several_axes:
        functions.append(sliding_window_causal_mask_function(window))
    else:
        if causal:
            functions.append(causal_mask_function)
        if window is not None:
            functions.append(near_on_all_axes(positions.ids, window) if several_axes else near(window))
    if positions.segments is not None:
        functions.append(packed_sequence_mask_function(positions.segments.expand(batch, -1)))
    if also is not None:
        functions.append(also)
    if not functions:
        return bidirectional_mask_function
    return functions[0] if len(functions) == 1 else and_masks(*functions)


def near(window: int) -> MaskFunction:
    """Tokens fewer than `window` away, before or after."""

    def mask(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (query - key).abs() < window

    return mask


def near_on_all_axes(ids: Tensor, window: int) -> MaskFunction:
    """Tokens whose ids [B or 1, N, A] differ by less than `window` along every axis."""
    shared = ids.shape[0] == 1

    def mask(batch: Any, head: Any, query: Any, key: Any) -> Any:
        row = torch.zeros_like(batch) if shared else batch
        return ((ids[row, query] - ids[row, key]).abs() < window).all(-1)

    return mask


def behind(function: MaskFunction, offset: int) -> MaskFunction:
    """A mask function for queries whose first one is token `offset`."""

    def mask(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return function(batch, head, query + offset, key)

    return mask


def materialise(
    implementation: str, function: MaskFunction, x: Tensor, num_keys: int, padding: Tensor | None, config: Any = None
) -> Tensor | BlockMask:
    """A mask function as the tensor or block mask that an attention implementation takes.

    x: [B, N, C], the queries' tokens; padding: [B, K] bool, False for padding.
    """
    if implementation == "flex_attention" and x.device.type == "cpu":
        # transformers compiles this too, which on the CPU takes seconds for every new shape
        masks = [function] if padding is None else [function, padding_mask_function(padding)]
        return create_block_mask(and_masks(*masks), x.shape[0], None, x.shape[1], num_keys, device=x.device)
    return ALL_MASK_ATTENTION_FUNCTIONS[implementation](
        batch_size=x.shape[0],
        q_length=x.shape[1],
        kv_length=num_keys,
        mask_function=function,
        attention_mask=padding,
        allow_is_causal_skip=False,
        dtype=x.dtype,
        config=config,
        device=x.device,
    )
