"""Context parallelism: each process holds a part of every row (docs/how-to/several-gpus.md)."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ..encodings import PositionalEncoding, Positions
from ..encodings.positions import sequence_extent
from ..encodings.shards import Shards
from ..nn.core import AttentionMask, PlainAttention
from ..nn.ring import ENGINE, ring_attention
from .configuration import EquitapeConfig

if TYPE_CHECKING:
    from .modeling import EquitapePreTrainedModel


@contextmanager
def context_parallel(model: "EquitapePreTrainedModel", group: Any = None) -> Iterator[Shards]:
    """Inside the block, every call of the model gets this process's part of rows that a process group shares.

    group: of torch.distributed; default: all processes. The result splits whole rows (`shards.split(input_ids)`) and
    joins parts (`shards.join(logits)`). Pass split `shift_labels` with the labels: the next token of a piece's last one
    is on another process. Gradients of weights must be summed over the group, as DDP and FSDP2 do.
    """
    from torch import distributed as dist

    shards = Shards(group if group is not None else dist.group.WORLD)
    check_model(model.config, model.base_model.encoding)
    model.base_model.shards = shards
    try:
        yield shards
    finally:
        model.base_model.shards = None


def check_model(config: EquitapeConfig, encoding: PositionalEncoding) -> None:
    """Raise ValueError for a model whose rows cannot be split over processes."""
    refusal = None
    if encoding.adds_bias:
        refusal = f"encoding {encoding.kind!r} adds a bias to every score"
    elif not encoding.causal or encoding.kind == "randpe":
        refusal = f"encoding {encoding.kind!r} draws or scales ids by the whole row"
    elif config.sliding_window is not None:
        refusal = "ring attention has no sliding window"
    elif config.attention_dropout:
        refusal = "ring attention has no dropout; set attention_dropout to 0"
    elif config._attn_implementation != "sdpa":
        refusal = f"ring attention replaces 'sdpa', and the model uses {config._attn_implementation!r}"
    if refusal is not None:
        raise ValueError(f"Rows of this model cannot be split over processes: {refusal}.")


def refuse_torchs_split() -> None:
    """Raise ValueError inside torch's own context_parallel, where the model would not know which tokens it gets."""
    engine = sys.modules.get(ENGINE)
    if engine is not None and nn.functional.scaled_dot_product_attention in engine._replaced_functions:
        raise ValueError(
            "Rows are split by torch's context_parallel, and this model does not know how; call it inside "
            "equitape.model.context_parallel.context_parallel(model, group), or train with equitape."
        )


def check_call(attention_mask: Any, segment_ids: Tensor | None, past: Any, restricted: bool) -> None:
    """Raise ValueError for arguments that do not go with split rows."""
    if segment_ids is not None:
        raise ValueError(
            "segment_ids marks packed rows, and rows that are split over processes cannot be packed; train on rows of "
            "one document each."
        )
    if attention_mask is not None:
        raise ValueError(
            "Rows that are split over processes take no attention_mask; leave it out, and pad only at the end of rows."
        )
    if past is not None:
        raise ValueError("Rows that are split over processes cannot continue a cache; leave out past_key_values.")
    if restricted:
        raise ValueError(
            "LongLoRA's groups cannot be split over processes; use another method, or one process per row."
        )


def place(
    encoding: PositionalEncoding, x: Tensor, position_ids: Tensor | None, jumps: Tensor | None, shards: Shards
) -> Positions:
    """The positions of this process's tokens x [B, N, C] in their rows."""
    shards.check_length(x.shape[1] * shards.size)
    places = shards.places(x.shape[1], x.device)[None]
    ids = places if position_ids is None else position_ids
    if position_ids is not None:
        shards.check_order(position_ids)
    if jumps is not None:
        ids = ids + shards.running_sum(jumps)
    # ids that Trainer splits have the jumps in them
    positions = Positions(ids=ids, shards=shards, counts=places)
    if encoding.needs_extent:
        origin, span = sequence_extent(ids, None, None)
        last = shards.extreme(origin + span, largest=True)
        origin = shards.extreme(origin, largest=False)
        positions = positions._replace(origin=origin, span=last - origin)
    return positions


def ring_mask(shards: Shards, scaling: float) -> AttentionMask:
    """Attention around the ring, for layers with full attention."""

    def attend(plain: PlainAttention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return ring_attention(shards, scaling, query, key, value)

    return AttentionMask(attend=attend)
