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
        self.mlp = EquitapeMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

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
        attention_output, _, attended_state, state = self.self_attn(
            self.input_layernorm(hidden_states),
            state,
            positions,
            attention_mask,
            scaling,
            past_key_values=past_key_values,
            cache_layer=cache_layer,
            **kwargs,
        )
        hidden_states = hidden_states + attention_output
        normed_hidden = self.post_attention_layernorm(hidden_states)
        mlp_output = self.mlp(normed_hidden)
        return hidden_states + mlp_output, self.self_attn.encoding(
            "update", state, attended_state, normed_hidden, mlp_output
        )
