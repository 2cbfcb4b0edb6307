"""One attention layer with its update of the positional state, taken from a model.

Shapes: B batch, N tokens, H query heads, G key-value heads, D head dimension, C hidden size.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ..model.block import EquitapeDecoderLayer
from ..model.masks import build_masks, build_positions
from ..model.modeling import EquitapeModel
from ..nn import Attention
from ..nn.core import AttentionCore
from .shapes import Shape


class Columns(nn.Module):
    """Replaces a projection: selects columns of the input."""

    def __init__(self, begin: int, end: int):
        super().__init__()
        self.begin, self.end = begin, end

    def forward(self, x: Tensor) -> Tensor:
        return x[..., self.begin : self.end]


class AttentionPart(nn.Module):
    """(hidden, state) -> (attended, state): the part of a block that depends on the encoding.

    With projections, it is the attention layer, its residual and the norm after it; hidden is [B, N, C]. Without, it is
    the core: hidden [B, N, (H + 2 G) D] holds queries, keys and values, and attended is the attention output.
    """

    def __init__(self, shape: Shape, encoding: str | dict[str, Any], attention: str, length: int, projections: bool):
        super().__init__()
        # the first of two blocks updates the state; the last never does
        config = shape.config(encoding, attention, length, num_hidden_layers=2, vocab_size=8)
        model = EquitapeModel(config)
        block = model.layers[0]
        assert isinstance(block, EquitapeDecoderLayer)
        self.config = config
        self.attention: AttentionCore = block.self_attn
        self.encoding = model.encoding
        self.updates = any(model.encoding.carried_columns)
        self.scaling = shape.head_dim**-0.5 * model.encoding.score_scale
        self.norm: nn.Module | None = block.post_attention_layernorm if projections else None
        self.input_size = shape.hidden_size
        if not projections:
            queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
            if queries != shape.hidden_size:
                raise ValueError(
                    f"Shape {shape.name!r} has heads that do not fill its width; measure 'attention' instead."
                )
            replacements = {
                "q_proj": Columns(0, queries),
                "k_proj": Columns(queries, queries + keys),
                "v_proj": Columns(queries + keys, queries + keys + shape.num_kv_heads * self.attention.value_dim),
                "o_proj": nn.Identity(),
            }
            for name, module in replacements.items():
                setattr(self.attention, name, module)
            self.input_size = queries + 2 * keys

    @torch.no_grad()
    def initial_state(self, hidden: Tensor) -> Tensor | None:
        """Compute positions and masks, once for all layers as in a model; returns the initial state."""
        positions = build_positions(self.encoding, hidden, None, None, None, None)
        masks = build_masks(self.config, self.encoding, hidden, None, positions, None)
        self.attention_mask = next(iter(masks.values()))
        self.positions = self.encoding("map_ids", positions, hidden, None)
        return self.encoding("initial_state", self.positions, hidden.dtype)

    def finish(self, hidden: Tensor, output: Tensor) -> Tensor:
        """What the rest of the block reads of the attention output [B, N, C]."""
        return output if self.norm is None else self.norm(hidden + output)

    def forward(self, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, ...]:
        output, _, attended_state, state = self.attention(
            hidden, state, self.positions, self.attention_mask, self.scaling
        )
        attended = self.finish(hidden, output)
        if not self.updates:
            return (attended,)
        updated = self.attention.encoding("update", state, attended_state, attended, attended)
        assert updated is not None
        return attended, updated


class StandalonePart(AttentionPart):
    """The same layer as a module of equitape.nn, with the same weights and the features of a decoder block."""

    def __init__(self, shape: Shape, encoding: str | dict[str, Any], attention: str, length: int, projections: bool):
        super().__init__(shape, encoding, attention, length, projections)
        # without weights, so that it draws no random numbers
        with torch.device("meta"):
            own = Attention(
                shape.hidden_size,
                shape.num_heads,
                self.encoding,
                num_kv_heads=shape.num_kv_heads,
                head_dim=shape.head_dim,
                implementation=attention,
            )
        own.load_state_dict(self.attention.state_dict(), assign=True)
        self.attention = own

    def forward(self, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, ...]:
        kept: list[Tensor] = []

        def features(output: Tensor) -> Tensor:
            kept.append(self.finish(hidden, output))
            return kept[0]

        output, updated = self.attention(hidden, state, positions=self.positions, features=features)
        return (kept[0], updated) if self.updates else (self.finish(hidden, output),)
