"""Equitape models as vLLM models: vLLM's linear layers, norms and paged attention, with equitape's encoding hooks.

vLLM's kernels take values as wide as keys. A widened value goes through several attention layers with the same key, in
parts of the width of the key: correct on every backend.

Shapes: N tokens of all requests in one row, H and G query and key-value heads of this rank, D head dimension, W width
of an attention layer, E columns added to the value.
"""

from collections.abc import Iterable
from copy import copy
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.distributed import (
    get_pp_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
)
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.interfaces import SupportsPP, SupportsQuant
from vllm.model_executor.models.llama import LlamaMLP, LlamaModel
from vllm.model_executor.models.utils import (
    AutoWeightsLoader,
    PPMissingLayer,
    extract_layer_index,
    make_layers,
    maybe_prefix,
)
from vllm.sequence import IntermediateTensors
from vllm.v1.attention.selector import get_attn_backend

from ..encodings import LayerEncoding, Positions, build_encoding
from ..encodings.heads import Columns
from ..nn.backends import equal_parts
from ..nn.core import rotate
from .checks import check_served
from .sums import STEEPNESS, Sums

WIDEST = 512


def attention_width(needed: int, vllm_config: VllmConfig) -> int:
    """The smallest head size from `needed` on that vLLM's attention supports on this machine."""
    for width in range(-(-needed // 8) * 8, WIDEST + 1, 8):
        try:
            backend = get_attn_backend(width, torch.get_default_dtype(), vllm_config.cache_config.cache_dtype)
        except ValueError:
            continue
        if backend.supports_head_size(width):
            return width
    raise ValueError(f"vLLM has no attention for keys of width {needed} on this machine; use generate_batch.")


class EquitapeAttention(nn.Module):
    """Attention of one block, with one set of vLLM layers per loop."""

    def __init__(self, vllm_config: VllmConfig, encoding: LayerEncoding, width: int, scaling: float, prefix: str):
        super().__init__()
        config, quant = vllm_config.model_config.hf_config, vllm_config.quant_config
        self.ranks, rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
        self.dim, self.width, self.scaling, self.encoding = config.head_dim, width, scaling, encoding
        self.all_heads, self.all_groups = config.num_attention_heads, config.num_key_value_heads
        self.heads, self.groups = self.all_heads // self.ranks, max(1, self.all_groups // self.ranks)
        first = rank * self.all_groups // self.ranks
        self.own = slice(first, first + self.groups)
        self.own_heads = slice(rank * self.heads, (rank + 1) * self.heads)
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size, self.dim, self.all_heads, self.all_groups,
            bias=config.attention_bias, quant_config=quant, prefix=f"{prefix}.qkv_proj",
        )  # fmt: skip
        self.o_proj = RowParallelLinear(
            self.all_heads * self.dim, config.hidden_size,
            bias=config.attention_output_bias, quant_config=quant, prefix=f"{prefix}.o_proj",
        )  # fmt: skip
        if config.qk_norm:
            self.q_norm, self.k_norm = (RMSNorm(self.dim, eps=config.rms_norm_eps) for _ in range(2))
        block, blocks = extract_layer_index(prefix), config.geometry.num_layers
        parts = -(-config.value_cache_dims[block] // width)
        unlimited = copy(vllm_config.cache_config)
        unlimited.sliding_window = None

        def attention(loop: int, name: str, scale: float, windowed: bool) -> Attention:
            slides = windowed and config.layer_types[loop * blocks + block] == "sliding_attention"
            return Attention(
                self.heads, width, scale, num_kv_heads=self.groups, cache_config=unlimited, quant_config=quant,
                per_layer_sliding_window=config.sliding_window if slides else None,
                prefix=f"{prefix}.{name}_loop{loop}",
            )  # fmt: skip

        self.parts = parts
        self.attn = nn.ModuleList(
            [
                attention(loop, f"attn_part{part}", scaling, True)
                for loop in range(config.num_loops)
                for part in range(parts)
            ]
        )
        self.columns = getattr(encoding, "num_columns", 0)
        if encoding.keeps_sums:
            self.sums = nn.ModuleList(
                [
                    Sums(attention(loop, "sums", STEEPNESS, False), self.heads, self.groups, width, self.columns)
                    for loop in range(config.num_loops)
                ]
            )

    def _sums(self, loop: int) -> Sums:
        layer = self.sums[loop]
        assert isinstance(layer, Sums)
        return layer

    def read_sums(self, positions: Positions, dtype: torch.dtype, loop: int) -> tuple[Tensor, Positions]:
        """Columns of the last cached key of each token's request, [1, all groups, N, E], and positions that know where
        requests start.
        """
        ids = positions.ids[0]
        found, first = self._sums(loop).read(ids, dtype)
        if self.ranks > 1:
            # with fewer groups than ranks, neighbours hold the same one
            copies = self.ranks * self.groups // self.all_groups
            found = tensor_model_parallel_all_gather(found.contiguous(), dim=1)[:, ::copies]
        runs = torch.arange(ids.shape[0], device=ids.device) - (ids - first)
        return found.transpose(0, 1)[None], positions._replace(segments=runs[None])

    def forward(self, x: Tensor, state: Tensor | None, positions: Positions, loop: int) -> tuple[Tensor, Tensor | None]:
        """Returns the output [N, C] and the attention average of the added columns, [1, all heads, N, E] or None."""
        qkv, _ = self.qkv_proj(x)
        query, key, value = (
            part.unflatten(-1, (-1, self.dim))
            for part in qkv.split([self.heads * self.dim, self.groups * self.dim, self.groups * self.dim], dim=-1)
        )
        if hasattr(self, "q_norm"):
            query, key = self.q_norm(query.contiguous()), self.k_norm(key.contiguous())
        if state is not None and state.shape[1] > self.groups:
            state = state[:, self.own]
        carried = self.encoding("extra_values", state)
        added = self._columns(x, positions, value.dtype, loop) if self.columns else None
        query, key = rotate(self.encoding, query.transpose(0, 1)[None], key.transpose(0, 1)[None], state, added)
        query, key = query.to(value.dtype), key.to(value.dtype)
        query, key = (pad(y[0].transpose(0, 1), (0, self.width - y.shape[-1])).flatten(1) for y in (query, key))
        if carried is not None:
            value = torch.cat((value, carried[0].transpose(0, 1).expand(*value.shape[:2], -1).to(value.dtype)), dim=-1)
        layers = islice(self.attn, loop * self.parts, (loop + 1) * self.parts)
        parts = [
            layer(query, key, part.flatten(1)).unflatten(-1, (self.heads, self.width))
            for layer, part in zip(layers, equal_parts(value, self.width), strict=True)
        ]
        both = torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]
        output, _ = self.o_proj(both[..., : self.dim].flatten(1))
        if carried is None:
            return output, None
        attended = both[..., self.dim : value.shape[-1]]
        if self.ranks > 1:
            attended = tensor_model_parallel_all_gather(attended.contiguous(), dim=1)
        return output, attended.transpose(0, 1)[None]

    def _columns(self, x: Tensor, positions: Positions, dtype: torch.dtype, loop: int) -> Columns:
        """Decay and clock: columns of queries and keys, for the heads of this rank out of all."""
        last = None
        if self.encoding.keeps_sums:
            last, positions = self.read_sums(positions, dtype, loop)
        columns: Columns = self.encoding("columns", x[None], positions, last, dtype, self.scaling)
        if self.ranks > 1:
            of_key = columns.key.expand(-1, self.all_groups, -1, -1)[:, self.own]
            columns = columns._replace(query=columns.query[:, self.own_heads], key=of_key)
        if self.encoding.keeps_sums:
            new = columns.key.expand(-1, self.groups, x.shape[0], -1)[0].transpose(0, 1)
            new = self._sums(loop).write(positions.ids[0], new).transpose(0, 1)[None]
            columns = columns._replace(key=new)
        return columns


class EquitapeBlock(nn.Module):
    """(tokens, state) -> (tokens, state)."""

    def __init__(self, vllm_config: VllmConfig, encoding: LayerEncoding, width: int, scaling: float, prefix: str):
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.self_attn = EquitapeAttention(vllm_config, encoding, width, scaling, f"{prefix}.self_attn")
        self.mlp = LlamaMLP(
            config.hidden_size, config.intermediate_size, config.hidden_act, vllm_config.quant_config,
            bias=config.mlp_bias, prefix=f"{prefix}.mlp",
        )  # fmt: skip
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, x: Tensor, state: Tensor | None, positions: Positions, loop: int) -> tuple[Tensor, Tensor | None]:
        output, attended = self.self_attn(self.input_layernorm(x), state, positions, loop)
        x = x + output
        normed = self.post_attention_layernorm(x)
        fed = self.mlp(normed)
        return x + fed, self.self_attn.encoding("update", state, attended, normed[None], fed[None])


@support_torch_compile
class EquitapeModel(nn.Module):
    """Embeddings, the blocks of this pipeline stage, and the final norm."""

    hf_to_vllm_mapper = LlamaModel.hf_to_vllm_mapper

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        config = self.config = vllm_config.model_config.hf_config
        geometry, group = config.geometry, get_pp_group()
        self.encoding = build_encoding(config.encoding, geometry).eval()
        check_served(
            config, self.encoding, get_tensor_model_parallel_world_size(), group.world_size,
            str(vllm_config.cache_config.cache_dtype),
        )  # fmt: skip
        scaling = config.head_dim**-0.5 * self.encoding.score_scale
        width = attention_width(max(config.key_cache_dims), vllm_config)
        embeds = group.is_first_rank or (config.tie_word_embeddings and group.is_last_rank)
        self.embed_tokens = PPMissingLayer()
        if embeds:
            self.embed_tokens = VocabParallelEmbedding(
                config.vocab_size, config.hidden_size, quant_config=vllm_config.quant_config
            )

        def block(prefix: str) -> EquitapeBlock:
            encoding = self.encoding.layer(extract_layer_index(prefix))
            return EquitapeBlock(vllm_config, encoding, width, scaling, prefix)

        self.start_layer, self.end_layer, self.layers = make_layers(
            geometry.num_layers, block, prefix=f"{prefix}.layers"
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps) if group.is_last_rank else PPMissingLayer()

    def embed_input_ids(self, input_ids: Tensor | None) -> Tensor:
        return self.embed_tokens(input_ids)

    def make_empty_intermediate_tensors(
        self, batch_size: int, dtype: torch.dtype, device: torch.device
    ) -> IntermediateTensors:
        """What a pipeline stage receives, before there is anything: tokens and positional state."""
        tensors = {"hidden_states": torch.zeros(batch_size, self.config.hidden_size, dtype=dtype, device=device)}
        state = self._state(torch.zeros(1, dtype=torch.long, device=device), None, dtype)
        if state is not None:
            tensors["state"] = torch.zeros(batch_size, state[0, :, 0].numel(), dtype=dtype, device=device)
        return IntermediateTensors(tensors)

    def _positions(self, ids: Tensor) -> Positions:
        """Every request starts at 0."""
        origin = torch.zeros_like(ids[None, :1]) if self.encoding.needs_extent else None
        return Positions(ids=ids[None], origin=origin)

    def _state(self, ids: Tensor, drift: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        positions = self._positions(ids)
        if drift is None and getattr(self.encoding, "has_clock", False):
            drift = torch.zeros(1, self.config.num_key_value_heads, ids.shape[0], device=ids.device)
        return self.encoding("initial_state", positions._replace(drift=drift), dtype)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor | IntermediateTensors:
        ids = positions.long()
        places = self._positions(ids)
        if get_pp_group().is_first_rank:
            x = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
            if getattr(self.encoding, "has_clock", False):
                last, located = self.layers[self.start_layer].self_attn.read_sums(places, x.dtype, 0)
                places = places._replace(drift=self.encoding("map_ids", located, x[None], last).drift)
            x = self.encoding("embed", x[None], places)[0]
            state = self._state(ids, places.drift, x.dtype)
        else:
            assert intermediate_tensors is not None
            x, state = intermediate_tensors["hidden_states"], self._received(intermediate_tensors)
        inputs = x
        for loop in range(self.config.num_loops):
            if loop:
                x = x + inputs
            for block in islice(self.layers, self.start_layer, self.end_layer):
                x, state = block(x, state, places, loop)
        if get_pp_group().is_last_rank:
            return self.norm(x)
        tensors = {"hidden_states": x}
        if state is not None:
            heads = self._heads_of_state()
            tensors["state"] = state.expand(-1, heads, -1, -1)[0].transpose(0, 1).flatten(1)
        return IntermediateTensors(tensors)

    def _heads_of_state(self) -> int:
        state = self._state(torch.zeros(1, dtype=torch.long), None, torch.float32)
        return 1 if state is None else state.shape[1]

    def _received(self, tensors: IntermediateTensors) -> Tensor | None:
        if "state" not in tensors.tensors:
            return None
        return tensors["state"].unflatten(-1, (self._heads_of_state(), -1)).transpose(0, 1)[None]


class EquitapeForCausalLM(nn.Module, SupportsPP, SupportsQuant):
    """The decoder with a language-modelling head, for vLLM."""

    hf_to_vllm_mapper = LlamaModel.hf_to_vllm_mapper
    packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        config = self.config = vllm_config.model_config.hf_config
        self.model = EquitapeModel(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        self.lm_head = PPMissingLayer()
        if get_pp_group().is_last_rank:
            self.lm_head = ParallelLMHead(
                config.vocab_size, config.hidden_size, quant_config=vllm_config.quant_config,
                prefix=maybe_prefix(prefix, "lm_head"),
            )  # fmt: skip
            if config.tie_word_embeddings:
                self.lm_head = self.lm_head.tie_weights(self.model.embed_tokens)
        self.logits_processor = LogitsProcessor(config.vocab_size)
        self.make_empty_intermediate_tensors = self.model.make_empty_intermediate_tensors

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.model.embed_input_ids(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor | IntermediateTensors:
        return self.model(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)
