"""The attention of a decoder block."""

from typing import Any

from torch import Tensor

from ..encodings import LayerEncoding
from ..nn.core import Attended, AttentionCore
from .configuration import EquitapeConfig


class EquitapeAttention(AttentionCore):
    """The attention of `equitape.nn` with the sizes and the implementation of a configuration.

    The block updates the state itself, from features that exist only after its feed-forward layer.
    """

    def __init__(self, config: EquitapeConfig, layer_idx: int, encoding: LayerEncoding):
        assert config.head_dim is not None and config.num_key_value_heads is not None
        super().__init__(
            encoding,
            hidden_size=config.hidden_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            bias=config.attention_bias,
            output_bias=bool(config.attention_output_bias),
            qk_norm=config.qk_norm,
            qk_norm_joint=config.qk_norm_joint,
            norm_eps=config.rms_norm_eps,
            norm_offset=config.norm_offset,
            rotates=layer_idx not in (config.unrotated_layers or ()),
            dropout=config.attention_dropout,
        )
        self.config = config
        self.layer_idx = layer_idx

    @property
    def implementation(self) -> str:  # type: ignore[override]
        """transformers changes it in the configuration."""
        return self.config._attn_implementation

    def forward(self, hidden_states: Tensor, state: Tensor | None, *inputs: Any, **kwargs: Any) -> Attended:
        """Arguments as in `AttentionCore.attend`. transformers records the attention weights of this result."""
        if self.config.attention_softcap is not None:
            kwargs["softcap"] = self.config.attention_softcap
        return self.attend(hidden_states, state, *inputs, **kwargs)
