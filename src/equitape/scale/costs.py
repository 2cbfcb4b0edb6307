"""What a model costs, from its configuration alone: weights, operations, kept activations, cache, ring traffic.

The tests compare these formulas with what torch counts on small models and with measured peaks of larger ones.

Letters in formulas: C hidden size, I inner size of the feed-forward layer, V vocabulary, H query heads, G key-value
heads, D head dimension, b bytes per number.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import nn

from ..encodings import LayerEncoding, build_encoding
from ..model import EquitapeConfig
from ..nn.backends import SPLIT_HEAD_DIM

FLOAT32 = 4
"""Bytes; norms, the softmax and statistics of attention are float32 whatever the model's dtype."""


@dataclass(frozen=True, kw_only=True)
class Operations:
    """Floating-point operations of matrix products; an addition and a multiplication count as two."""

    matrix: float
    """Of projections, feed-forward layers, the head and the encoding's updates."""
    attention: float
    """Of scores and averages."""

    @property
    def total(self) -> float:
        return self.matrix + self.attention


@dataclass(frozen=True, kw_only=True)
class Block:
    """One application of a decoder block: the widths that an encoding changes."""

    key_width: int
    """Columns of a query and of a key."""
    value_width: int
    """Columns of a value, the carried state included."""
    parameters: int
    matrices: int
    """Weights of the matrices that a token passes, without the encoding."""
    inner: int
    """Inner columns of the feed-forward layers that a token passes."""
    encoding_operations: int
    """Operations per token of the encoding's matrices."""
    gates: int
    """Numbers per token that a content gate keeps for the backward pass."""
    updates: bool
    """Whether the block updates a field."""
    moves: bool
    """Whether the field also moves."""
    rotated_values: int
    """Key-value heads whose values a trained field rotates: one with a clock, or after an update."""
    rotates: bool
    calls: int
    """Attention calls on CUDA: two where they train faster than one with a wide value."""
    window: int | None


class Experts(NamedTuple):
    """A layer's mixture of experts."""

    total: int
    used: int
    """By each token."""
    inner: int
    """Inner columns of each."""


class ModelCosts:
    """The costs of a decoder. No weight is made."""

    def __init__(self, config: EquitapeConfig):
        assert isinstance(config.encoding, dict)
        assert config.head_dim is not None and config.num_key_value_heads is not None
        self.config = config
        self.width, self.inner, self.vocabulary = config.hidden_size, config.intermediate_size, config.vocab_size
        self.heads, self.groups, self.head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        with torch.device("meta"):
            self.encoding = build_encoding(config.encoding, config.geometry)
            self._encodings = [self.encoding] * config.geometry.num_layers
            if isinstance(config.local_encoding, dict):
                local = build_encoding(config.local_encoding, config.geometry)
                for index in config.local_layers:
                    self._encodings[index % len(self._encodings)] = local
            layers = [encoding.layer(index) for index, encoding in enumerate(self._encodings)]
        self.encoding_parameters = sum(each.numel() for each in self.encoding.parameters())
        self.loops = config.num_loops
        self._first_update = next((at for at, layer in enumerate(layers) if layer.updates_state), len(layers))
        unrotated = config.unrotated_layers or ()
        # key-value heads whose values an updated field rotates
        self._value_heads = [
            layer.value_heads if self._encodings[at] is self.encoding and at not in unrotated else 0
            for at, layer in enumerate(layers)
        ]
        self.layers = [self._block(index, layer) for index, layer in enumerate(layers)]

    def _block(self, index: int, layer: LayerEncoding) -> Block:
        config, parameters, encoding = self.config, dict(layer.named_parameters()), self._encodings[index]
        carried, experts = encoding.value_columns[index], self._experts(index)
        operations = self._encoding_operations(parameters, encoding.carried_columns[index] or self.head_dim)
        # a value that makes room for the state has narrower projections
        narrower = self.width * layer.value_room * (self.heads + self.groups)
        extra = self._extra(index) - narrower - self.groups * layer.value_room * config.attention_bias
        clock = getattr(self.encoding, "has_clock", False)
        inner, scored = (experts.used * experts.inner, experts.total) if experts else (self.inner, 0)
        return Block(
            key_width=self.head_dim + encoding.key_columns[index],
            value_width=self.head_dim + carried,
            parameters=sum(each.numel() for each in parameters.values()) + self._plain_parameters + extra,
            matrices=self._projections - narrower + self.width * (3 * (inner - self.inner) + scored),
            inner=inner,
            encoding_operations=operations,
            gates=parameters["gate.weight"].shape[0] if "gate.weight" in parameters else 0,
            updates=bool(encoding.has_field and operations),
            moves=hasattr(layer, "move_gain"),
            rotated_values=self._value_heads[index] if index > self._first_update or clock else 0,
            calls=2 if carried and self.head_dim >= SPLIT_HEAD_DIM else 1,
            rotates=type(layer).rotate is not LayerEncoding.rotate,
            window=config.sliding_window if config.layer_types[index] == "sliding_attention" else None,
        )

    def _encoding_operations(self, parameters: dict[str, nn.Parameter], state: int) -> int:
        """Operations per token of the matrices of a block's encoding, whose state has so many columns per head."""
        operations = 0
        for name, each in parameters.items():
            if self.encoding.has_field and name == "mix_in":
                # a matrix of real numbers per token is formed from this one and mix_out, then applied to the state
                parts = 2 if each.dim() == 3 else 1
                operations += 2 * parts * self.groups**2 * (parts * each.shape[-2] + state)
            elif each.dim() > 1 and not (self.encoding.has_field and name == "mix_out"):
                # a matrix reads the features of a token once, or mixes the heads of every column of the state
                operations += 2 * each.numel() * (1 if each.shape[-1] == self.width else state)
        return operations

    @cached_property
    def _projections(self) -> int:
        """Weights of a block's matrices without the encoding."""
        of_attention = self.width * self.head_dim * (2 * self.heads + 2 * self.groups)
        return of_attention + 3 * self.width * self.inner

    @cached_property
    def _plain_parameters(self) -> int:
        """Weights of a block without the encoding: matrices, norms and biases."""
        config, count = self.config, self._projections + 2 * self.width
        if config.attention_bias:
            count += self.head_dim * (self.heads + 2 * self.groups)
        if config.attention_output_bias:
            count += self.width
        if config.mlp_bias:
            count += 2 * self.inner + self.width
        return count + (2 * self.head_dim if config.qk_norm else 0)

    def _extra(self, index: int) -> int:
        """Weights of a block that Llama's does not have: experts, norms on both sides or over all heads."""
        config, extra = self.config, 2 * self.width if self.config.norms == "both" else 0
        if config.qk_norm and config.qk_norm_joint:
            extra += self.head_dim * (self.heads + self.groups - 2)
        experts = self._experts(index)
        if experts is not None:
            extra += 3 * self.width * (experts.total * experts.inner - self.inner) + experts.total * self.width
        return extra

    def _experts(self, index: int) -> Experts | None:
        given = self.config.experts
        if given is None or index not in given["layers"]:
            return None
        return Experts(
            total=given.get("num_experts") or given["num_local_experts"],
            used=given["num_experts_per_tok"],
            inner=given.get("moe_intermediate_size") or self.inner,
        )

    @cached_property
    def blocks(self) -> list[Block]:
        """All applications of blocks, in order."""
        again = self.layers
        if self._first_update < len(self.layers):
            # from the second loop on, all of them are after an update
            again = [
                replace(layer, rotated_values=heads) for layer, heads in zip(again, self._value_heads, strict=True)
            ]
        return self.layers + again * (self.loops - 1)

    @cached_property
    def embedding_parameters(self) -> int:
        """The table of token embeddings, or of the head."""
        return self.vocabulary * self.width

    @cached_property
    def parameters(self) -> int:
        """All weights."""
        tables = self.embedding_parameters * (1 if self.config.tie_word_embeddings else 2)
        return sum(layer.parameters for layer in self.layers) + tables + self.width + self.encoding_parameters

    def forward(self, rows: int, length: int, *, logits: int | None = None, causal: bool = True) -> Operations:
        """Operations of a forward pass over rows of `length` tokens.

        logits: tokens per row whose logits are computed. Default: all. causal: count only pairs of tokens that see
        each other, as fused kernels do; False counts all pairs, as torch's counter does.
        """
        tokens = rows * length
        matrix = 2 * rows * (length if logits is None else logits) * self.embedding_parameters
        attention = 0
        for block in self.blocks:
            matrix += tokens * (2 * block.matrices + block.encoding_operations)
            seen = pairs(length, block.window) if causal else length * length
            attention += 2 * rows * seen * self.heads * (block.key_width + block.value_width)
        return Operations(matrix=matrix, attention=attention)

    def attention(self, rows: int, length: int, ring: bool = False) -> tuple[float, float]:
        """Operations of attention's kernels in training, forward and backward.

        The backward pass computes scores again, then gradients of query, key, value and weights. Every call computes
        its scores. ring: the kernel of split rows has one call for every part of the value as wide as the key.
        """
        forward = backward = 0.0
        for block in self.blocks:
            calls = -(-block.value_width // block.key_width) if ring else block.calls
            seen, keys = 2 * rows * pairs(length, block.window) * self.heads, calls * block.key_width
            forward += seen * (keys + block.value_width)
            backward += seen * (3 * keys + 2 * block.value_width)
        return forward, backward

    def kept_by_block(self, block: Block, size: int, *, compiled: bool = True, cuda: bool = True) -> int:
        """Bytes per token that a block keeps for its backward pass. size: b."""
        if compiled:
            # tokens before both norms, both normalised; gate, up and their product
            plain = size * (4 * self.width + 3 * block.inner)
        else:
            # every norm keeps float32 tokens, and them normalised before and after its weight
            plain = 2 * (FLOAT32 + 2 * size) * self.width + 4 * size * block.inner
        carried = block.value_width - self.head_dim
        # two calls join their results; on the CPU, every wide value takes two
        splits = block.calls > 1 or (carried > 0 and not cuda)
        numbers = block.key_width * (self.heads + self.groups) + block.value_width * (self.heads + self.groups)
        if block.rotates or carried:
            # the output projection reads another layout than attention writes
            numbers += self.heads * self.head_dim
        if splits:
            numbers += self.heads * carried
        if block.updates:
            numbers += block.gates + self.groups * self.head_dim * (not carried)
        if block.rotated_values:
            # the values and their field before the rotation, and what attention made of them before the one back
            numbers += 2 * block.rotated_values * self.head_dim
            numbers += self.heads * (block.value_width if splits else self.head_dim)
        if block.moves:
            # both mixtures of heads; uncompiled also their product, the moved field, and the attended field
            numbers += self.head_dim * (2 * self.groups if compiled else 4 * self.groups + self.heads)
        if self.config.qk_norm:
            numbers += self.head_dim * (self.heads + self.groups)
        statistics = FLOAT32 * (2 + self.heads * (2 if splits else 1))
        return plain + size * numbers + statistics

    def kept(self, size: int, *, compiled: bool = True, cuda: bool = True) -> int:
        """Bytes per token that all blocks and the last norm keep for the backward pass; logits are not included."""
        last = 2 * size * self.width if compiled else (FLOAT32 + 2 * size) * self.width
        blocks = sum(self.kept_by_block(block, size, compiled=compiled, cuda=cuda) for block in self.blocks)
        return last + self._kept_by_clock(size, compiled) + blocks

    def kept_checkpoints(self, size: int) -> int:
        """The same with gradient checkpointing: what enters each block, tokens and field."""
        field = self.groups * self.head_dim if any(block.updates for block in self.blocks) else 0
        return size * len(self.blocks) * (self.width + field) + 2 * size * self.width + self._kept_by_clock(size)

    def _kept_by_clock(self, size: int, compiled: bool = True) -> int:
        """Bytes per token that a clock keeps: normalised embeddings in float32, what they were made of, and phasors of
        all heads.
        """
        if not getattr(self.encoding, "has_clock", False):
            return 0
        cast = 0 if size == FLOAT32 else size if compiled else FLOAT32
        return (FLOAT32 + cast) * self.width + size * self.groups * self.head_dim

    def logits(self, size: int, *, compiled: bool = True) -> int:
        """Bytes per token of logits and loss where the backward pass begins.

        Compiled code writes the gradient over the logits; otherwise there are float32 log-probabilities and their
        gradient too.
        """
        return self.vocabulary * (size if compiled else size + 2 * FLOAT32)

    def cache(self, size: int) -> int:
        """Bytes per token of keys and values, for full attention."""
        return size * self.groups * sum(block.key_width + block.value_width for block in self.blocks)

    def cache_of_row(self, length: int, size: int) -> int:
        """Bytes of the keys and values of a row: blocks with a window keep only its tokens."""
        return (
            size
            * self.groups
            * sum(min(length, block.window or length) * (block.key_width + block.value_width) for block in self.blocks)
        )

    @cached_property
    def read_by_token(self) -> int:
        """Weights that one new token reads: all but those of the experts that it does not pass."""
        experts = filter(None, (self._experts(index) for index in range(len(self.layers))))
        return self.parameters - sum(3 * self.width * each.inner * (each.total - each.used) for each in experts)

    def ring(self, tokens: int, processes: int, size: int) -> int:
        """Bytes that each of several processes sends in one forward pass over `tokens` tokens: its keys and values
        visit all others.
        """
        return tokens // processes * (processes - 1) * self.cache(size)

    def ring_backward(self, tokens: int, processes: int, size: int) -> int:
        """The same of the backward pass: keys and values once more, and their gradients, which come home in float32."""
        if processes == 1:
            return 0
        return self.ring(tokens, processes, size) + tokens * self.cache(FLOAT32)

    def gathered_row(self, size: int) -> int:
        """Bytes per token of a row that a block holds while the row is split: torch's ring gathers keys and values."""
        return size * self.groups * max(block.key_width + block.value_width for block in self.blocks)


def pairs(length: int, window: int | None = None) -> int:
    """Pairs of a token and one that it sees: itself and earlier ones, at most `window`."""
    if window is None or window >= length:
        return length * (length + 1) // 2
    return window * (window + 1) // 2 + (length - window) * window
