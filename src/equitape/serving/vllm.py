"""Equitape models as vLLM models: embeddings, the blocks of blocks.py, and the head.

Shapes: N tokens of all requests in one row.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.distributed import get_pp_group, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.interfaces import SupportsPP, SupportsQuant
from vllm.model_executor.models.llama import LlamaModel
from vllm.model_executor.models.utils import (
    AutoWeightsLoader,
    PPMissingLayer,
    extract_layer_index,
    make_layers,
    maybe_prefix,
)
from vllm.sequence import IntermediateTensors

from ..encodings import Positions, build_encoding
from .blocks import EquitapeBlock, attention_width, make_norm
from .checks import check_served


@support_torch_compile
class EquitapeModel(nn.Module):
    """Embeddings, the blocks of this pipeline stage, and the final norm."""

    hf_to_vllm_mapper = LlamaModel.hf_to_vllm_mapper

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        config = self.config = vllm_config.model_config.hf_config
        geometry, group = config.geometry, get_pp_group()
        self.blocks, self.layer_types = geometry.num_layers, config.layer_types
        self.encoding = build_encoding(config.encoding, geometry).eval()
        self.local_encoding, self.local_layers = self.encoding, frozenset(config.local_layers)
        if config.local_encoding is not None:
            self.local_encoding = build_encoding(config.local_encoding, geometry).eval()
        cache_dtype = str(vllm_config.cache_config.cache_dtype)
        if cache_dtype == str(vllm_config.model_config.dtype).removeprefix("torch."):
            cache_dtype = "auto"
        for encoding in (self.encoding, self.local_encoding):
            check_served(
                config, encoding, get_tensor_model_parallel_world_size(), group.world_size, cache_dtype,
                vllm_config.model_config.max_model_len,
            )  # fmt: skip
        width = attention_width(max(config.key_cache_dims), vllm_config)
        embeds = group.is_first_rank or (config.tie_word_embeddings and group.is_last_rank)
        self.embed_tokens = PPMissingLayer()
        if embeds:
            self.embed_tokens = VocabParallelEmbedding(
                config.vocab_size, config.hidden_size, quant_config=vllm_config.quant_config
            )

        def block(prefix: str) -> EquitapeBlock:
            index = extract_layer_index(prefix)
            encoding = self.local_encoding if index in self.local_layers else self.encoding
            scaling = config.softmax_scale(index, encoding.score_scale)
            return EquitapeBlock(vllm_config, encoding.layer(index), width, scaling, prefix)

        self.start_layer, self.end_layer, self.layers = make_layers(
            geometry.num_layers, block, prefix=f"{prefix}.layers"
        )
        self.norm = make_norm(config.hidden_size, config) if group.is_last_rank else PPMissingLayer()

    def embed_input_ids(self, input_ids: Tensor | None) -> Tensor:
        x: Tensor = self.embed_tokens(input_ids)
        if self.config.embedding_scale is None:
            return x
        # rounded to the dtype of the weights, as Gemma does
        return x * torch.tensor(self.config.embedding_scale, dtype=x.dtype, device=x.device)

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
        counts = self.encoding.needs_extent or self.local_encoding.needs_extent
        origin = torch.zeros_like(ids[None, :1]) if counts else None
        grown: Positions = self.config.grow_queries(Positions(ids=ids[None], origin=origin))
        return grown

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
        local_state = self.local_encoding("initial_state", places, x.dtype) if self.local_layers else None
        # a window limits the keys, so its queries do not grow
        places_of = {"full_attention": places, "sliding_attention": places._replace(query_factor=None)}
        inputs = x
        for loop in range(self.config.num_loops):
            if loop:
                x = x + inputs
            for index in range(self.start_layer, self.end_layer):
                own = places_of[self.layer_types[loop * self.blocks + index]]
                if index in self.local_layers:
                    x, _ = self.layers[index](x, local_state, own, loop)
                else:
                    x, state = self.layers[index](x, state, own, loop)
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
        self.logits_processor = LogitsProcessor(config.vocab_size, soft_cap=config.logit_softcap)
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
