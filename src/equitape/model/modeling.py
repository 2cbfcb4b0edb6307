"""The decoder as transformers models: EquitapeModel, EquitapeForCausalLM and two classifiers."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.generation.continuous_batching.continuous_api import ContinuousMixin
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from ..encodings import LayerEncoding, PositionalEncoding, build_encoding
from ..encodings.base import ENCODINGS, SmallLinear
from ..encodings.decay import Decay
from ..encodings.shards import Shards
from ..nn.core import last_cached_key
from ..nn.norm import RMSNorm
from . import checks
from .attention import EquitapeAttention
from .block import EquitapeDecoderLayer
from .configuration import EquitapeConfig
from .experts import is_part_of_experts
from .masks import AttentionHook
from .old_files import accept_scalars
from .paged import PagedCache, PagedModel
from .preparation import Given, prepare


@dataclass
class EquitapeModelOutput(BaseModelOutputWithPast):
    """transformers' output plus the positional states of all layers."""

    position_states: tuple[Tensor, ...] | None = None


@dataclass
class EquitapeCausalLMOutput(CausalLMOutputWithPast):
    """transformers' output plus the positional states of all layers."""

    position_states: tuple[Tensor, ...] | None = None


class ScaledEmbedding(nn.Embedding):
    """Token embeddings times a factor, as in Gemma: what `get_input_embeddings` returns embeds as the model does."""

    def __init__(self, count: int, width: int, padding_idx: int | None, scale: float):
        super().__init__(count, width, padding_idx)
        # PEFT reads it under this name
        self.embed_scale = scale

    def forward(self, input: Tensor) -> Tensor:
        x = super().forward(input)
        # rounded to the dtype of the weights, as Gemma does
        return x * torch.tensor(self.embed_scale, dtype=x.dtype, device=x.device)


class EquitapePreTrainedModel(PreTrainedModel):
    """Base of all Equitape models: initialisation, loading, and supported features of transformers."""

    config: EquitapeConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["EquitapeDecoderLayer"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {
        "hidden_states": OutputRecorder(EquitapeDecoderLayer, index=0),
        "attentions": OutputRecorder(EquitapeAttention, index=1),
    }

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, SmallLinear):
            # as transformers' version does with nn.Linear
            init.normal_(module.weight, std=self.config.initializer_range)
            init.zeros_(module.bias)
        if isinstance(module, (PositionalEncoding, LayerEncoding)):
            module.reset_parameters(self.config.initializer_range)
        elif isinstance(module, Decay):
            # transformers visits only modules that have weights of their own, which its encoding may lack
            module.reset_parameters()
        elif isinstance(module, RMSNorm) and module.offset:
            init.constant_(module.weight, 1.0 - module.offset)
        elif is_part_of_experts(module):
            for parameter in module.parameters(recurse=False):
                init.normal_(parameter, mean=0.0, std=self.config.initializer_range)

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *args: Any, **kwargs: Any) -> str:
        assert isinstance(self.config.encoding, dict)
        kind = self.config.encoding["kind"]
        if self.config.attention_softcap is not None:
            attn_implementation = checks.check_softcap(attn_implementation)
        checks.check_backend(kind, ENCODINGS[kind].backends, attn_implementation)
        return super()._check_and_adjust_attn_implementation(attn_implementation, *args, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Do nothing: transformers would copy this package's source into saved models."""

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: Any, *args: Any, output_loading_info: bool = False, **kwargs: Any
    ) -> Any:
        """transformers' from_pretrained that raises on missing weights.

        Only a new task head on a decoder saved by another class may be missing. With `output_loading_info=True`, the
        caller gets the list of missing weights and decides.
        """
        name = pretrained_model_name_or_path
        model, info = super().from_pretrained(name, *args, output_loading_info=True, **kwargs)
        if output_loading_info:
            return model, info
        if name is not None:
            whole = model.base_model is model or cls.__name__ in (model.config.architectures or ())
            required = "" if whole else (f"{cls.base_model_prefix}.", "lm_head.")
            checks.check_loading(sorted(info["missing_keys"]), sorted(info["unexpected_keys"]), required)
        return model

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        """transformers' save_pretrained, which refuses GGUF files."""
        checks.check_target(save_directory)
        return super().save_pretrained(save_directory, *args, **kwargs)


class EquitapeModel(EquitapePreTrainedModel):
    """Embeddings, blocks and the final norm."""

    training_attention: AttentionHook | None = None
    """In training, replaces plain causal attention (masks.py); never saved."""
    shards: Shards | None = None
    """How rows are split over processes (context_parallel.py); never saved."""

    def __init__(self, config: EquitapeConfig):
        super().__init__(config)
        assert isinstance(config.encoding, dict)
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        geometry = config.geometry
        sizes, scale = (config.vocab_size, config.hidden_size, config.pad_token_id), config.embedding_scale
        self.embed_tokens = nn.Embedding(*sizes) if scale is None else ScaledEmbedding(*sizes, scale)
        self.encoding = build_encoding(config.encoding, geometry)
        self.local_encoding = (
            build_encoding(config.local_encoding, geometry) if isinstance(config.local_encoding, dict) else None
        )
        self.local_layers = frozenset(config.local_layers)
        encodings = [self.encoding_of(index).layer(index) for index in range(geometry.num_layers)]
        self.layers = nn.ModuleList(
            [EquitapeDecoderLayer(config, index, encoding) for index, encoding in enumerate(encodings)]
        )
        accept_scalars(self.layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.norm_offset)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        use_cache: bool | None = None,
        segment_ids: torch.LongTensor | None = None,
        position_jumps: torch.LongTensor | None = None,
        output_position_states: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> EquitapeModelOutput:
        """Run the decoder.

        attention_mask: [B, past + N], 1 for tokens and 0 for padding on either side; or 4D, used unchanged.
        position_ids: [B, N]. Default: counted along the row from 0 in each segment, without padding. Without mask,
            cache and segment_ids, an id that does not grow starts a new packed sequence.
        segment_ids: [B, N], equal numbers for tokens of one packed sequence; tokens attend only within their sequence.
        position_jumps: [B, N], 0 or more: ids from each token on increase by this. A training option that covers long
            distances in short rows.
        output_position_states: also return the state [B, G, N, D] with which each layer rotated queries and keys.
        """
        if output_position_states is None:
            output_position_states = self.config.output_position_states
        checks.check_tokens(input_ids, inputs_embeds)
        if input_ids is not None and isinstance(self.embed_tokens, nn.Embedding):
            checks.check_vocabulary(input_ids, self.embed_tokens.num_embeddings)
        x: Tensor = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        given = Given(attention_mask, position_ids, past_key_values, use_cache, segment_ids, position_jumps)
        positions, masks, past = prepare(self, x, given, kwargs)
        positions = self.config.grow_queries(positions)
        last_key = last_cached_key(past, 0, positions)
        positions = self.encoding("map_ids", positions, x, last_key)
        x = self.encoding("embed", x, positions)
        state = self.encoding("initial_state", positions, x.dtype)

        local = self.local_encoding
        local_state = None if local is None else local("initial_state", positions, x.dtype)
        layer_types = self.config.layer_types
        # a window limits the keys, so its queries do not grow
        positions_of = {"full_attention": positions, "sliding_attention": positions._replace(query_factor=None)}
        inputs, states = x, []
        for index in range(self.config.num_hidden_layers):
            loop, block = divmod(index, len(self.layers))
            if loop > 0 and block == 0:
                x = x + inputs
            if output_position_states and state is not None:
                states.append(state)
            encoding = self.encoding_of(index)
            x, new_state = self.layers[block](
                x,
                local_state if encoding is local else state,
                positions=positions_of[layer_types[index]],
                attention_mask=masks[layer_types[index]],
                scaling=self.config.softmax_scale(block, encoding.score_scale),
                past_key_values=past,
                cache_layer=index,
                **kwargs,
            )
            if encoding is not local:
                state = new_state
        return EquitapeModelOutput(
            last_hidden_state=self.norm(x),
            past_key_values=None if isinstance(past, PagedCache) else past,
            position_states=self._collect(states, x) if output_position_states else None,
        )

    def encoding_of(self, layer: int) -> PositionalEncoding:
        """The encoding of a layer."""
        return self.local_encoding if self.local_encoding is not None and layer in self.local_layers else self.encoding

    def _collect(self, states: list[Tensor], x: Tensor) -> tuple[Tensor, ...] | None:
        """The fields of all layers as [B, G, N, D]; None for encodings without one."""
        if not self.encoding.has_field:
            return None
        size = (x.shape[0], self.encoding.geometry.num_kv_heads, -1, -1)
        return tuple(self.encoding.field(state).expand(size) for state in states)


class EquitapeForCausalLM(EquitapePreTrainedModel, GenerationMixin):
    """The decoder with a language-modelling head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}

    def __init__(self, config: EquitapeConfig):
        super().__init__(config)
        self.model = EquitapeModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def _prepare_static_cache(
        self,
        cache_implementation: str,
        batch_size: int,
        max_cache_len: int,
        prefill_chunk_size: int | None,
        model_kwargs: dict[str, Any],
    ) -> Cache:
        """transformers' static cache. For prompts in chunks, which it compiles, its tensors are made beforehand, in the
        widths of this encoding's keys and values.
        """
        # without a chunk size, transformers leaves them to the first call
        cache: Cache = super()._prepare_static_cache(
            cache_implementation, batch_size, max_cache_len, None, model_kwargs
        )
        shape = None if prefill_chunk_size is None else self._get_static_cache_init_shape()
        if shape is not None:
            nothing = torch.empty(batch_size, shape[0], 0, 0, dtype=self.dtype, device=self.device)
            widths = zip(self.config.key_cache_dims, self.config.value_cache_dims, strict=True)
            for layer, both in zip(cache.layers, widths, strict=True):
                layer.lazy_initialization(*(nothing.new_empty(*nothing.shape[:3], width) for width in both))
        return cache

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Serve many requests at once from a paged cache: the start of `generate_batch`."""
        checks.check_paged_cache(self.model.encoding.eval(), self.config._attn_implementation)
        checks.check_uniform_layers(self.config, "Continuous batching", "use generate or vLLM")
        return ContinuousMixin.init_continuous_batching(PagedModel(self), *args, **kwargs)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        segment_ids: torch.LongTensor | None = None,
        position_jumps: torch.LongTensor | None = None,
        output_position_states: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> EquitapeCausalLMOutput:
        """Logits, and the loss if `labels` [B, N] are given (-100 marks tokens without a loss).

        In a packed batch, set the first label of every segment but the first to -100: the token before it belongs to
        another sequence. Other arguments are those of `EquitapeModel.forward`.
        """
        if labels is not None and "ignore_index" not in kwargs:
            checks.check_labels(labels, self.config.vocab_size)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            segment_ids=segment_ids,
            position_jumps=position_jumps,
            output_position_states=output_position_states,
            **kwargs,
        )
        hidden = outputs.last_hidden_state
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(hidden[:, kept, :])
        cap = self.config.logit_softcap
        if cap is not None:
            logits = cap * torch.tanh(logits / cap)
        loss = None
        if labels is not None:
            if self.model.shards is not None and kwargs.get("shift_labels") is None:
                raise ValueError(
                    "Rows that are split over processes need shift_labels: labels[:, 1:] of whole rows and -100 at "
                    "the end, then split."
                )
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return EquitapeCausalLMOutput(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            position_states=outputs.position_states,
        )


class EquitapeForQuestionAnswering(GenericForQuestionAnswering, EquitapePreTrainedModel):
    """The decoder with a head that predicts the first and last token of an answer."""


class EquitapeForSequenceClassification(GenericForSequenceClassification, EquitapePreTrainedModel):
    """The decoder with a classifier on the last token of each sequence."""


class EquitapeForTokenClassification(GenericForTokenClassification, EquitapePreTrainedModel):
    """The decoder with a classifier on every token."""
