"""One decoder block: attention and feed-forward update the tokens, the encoding updates the state."""

from typing import Any

from torch import Tensor, nn
from transformers import Cache
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer

from ..encodings import LayerEncoding, Positions
from ..nn.core import AttentionMask
from ..nn.norm import RMSNorm
from .attention import EquitapeAttention
from .configuration import EquitapeConfig
from .experts import make_experts


class EquitapeMLP(nn.Module):
    """Llama's gated feed-forward layer."""

    def __init__(self, config: EquitapeConfig):
        super().__init__()
        inner, outer, bias = config.intermediate_size, config.hidden_size, config.mlp_bias
        self.gate_proj = nn.Linear(outer, inner, bias=bias)
        self.up_proj = nn.Linear(outer, inner, bias=bias)
        self.down_proj = nn.Linear(inner, outer, bias=bias)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class EquitapeDecoderLayer(GradientCheckpointingLayer):
    """(tokens, state) -> (tokens, state), as positional arguments: checkpointing drops gradients of keyword
    arguments.
    """

    def __init__(self, config: EquitapeConfig, layer_idx: int, encoding: LayerEncoding):
        super().__init__()
        self.self_attn = EquitapeAttention(config, layer_idx, encoding)
        self.mlp = make_experts(config, layer_idx) or EquitapeMLP(config)
        self.norms = config.norms

        def norm() -> RMSNorm:
            return RMSNorm(config.hidden_size, config.rms_norm_eps, config.norm_offset)

        # Llama's name of the second norm is OLMo's and Gemma's of one behind attention
        self.post_attention_layernorm = norm()
        if config.norms != "after":
            self.input_layernorm = norm()
        if config.norms != "before":
            self.post_feedforward_layernorm = norm()
        if config.norms == "both":
            self.pre_feedforward_layernorm = norm()

    def forward(
        self,
        hidden_states: Tensor,
        state: Tensor | None,
        positions: Positions,
        attention_mask: AttentionMask,
        scaling: float,
        past_key_values: Cache | None = None,
        cache_layer: int = 0,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        normed = hidden_states if self.norms == "after" else self.input_layernorm(hidden_states)
        attention_output, _, attended_state, state = self.self_attn(
            normed,
            state,
            positions,
            attention_mask,
            scaling,
            past_key_values=past_key_values,
            cache_layer=cache_layer,
            **kwargs,
        )
        if self.norms != "before":
            attention_output = self.post_attention_layernorm(attention_output)
        hidden_states = hidden_states + attention_output
        normed_hidden = hidden_states
        if self.norms == "before":
            normed_hidden = self.post_attention_layernorm(hidden_states)
        elif self.norms == "both":
            normed_hidden = self.pre_feedforward_layernorm(hidden_states)
        mlp_output = self.mlp(normed_hidden)
        if self.norms != "before":
            mlp_output = self.post_feedforward_layernorm(mlp_output)
        return hidden_states + mlp_output, self.self_attn.encoding(
            "update", state, attended_state, normed_hidden, mlp_output
        )
