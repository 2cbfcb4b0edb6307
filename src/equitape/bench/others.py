"""Models and layers of other libraries, with the sizes and weights of ours.

Shapes: B batch, N tokens, H query heads, G key-value heads, D head dimension, C hidden size.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from ..encodings.path import reflected_products
from ..encodings.phasors import apply_rotary, phasors
from ..nn.norm import RMSNorm
from .shapes import Shape
from .subjects import FLA


def as_llama(model: PreTrainedModel, attention: str) -> PreTrainedModel:
    """transformers' Llama with the weights of our RoPE model, whose parameters have the same names."""
    config: Any = model.config
    names = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "max_position_embeddings", "tie_word_embeddings", "rms_norm_eps",
        "bos_token_id", "eos_token_id",
    )  # fmt: skip
    sizes = {name: getattr(config, name) for name in names}
    rope = {"rope_type": "default", "rope_theta": config.encoding["theta"]}
    # made in this dtype, not cast: a cast would round the rotary frequencies
    llama = AutoModelForCausalLM.from_config(
        LlamaConfig(**sizes, rope_parameters=rope), dtype=model.dtype, attn_implementation=attention
    )
    llama.load_state_dict(model.state_dict())
    return llama


class FlaPart(nn.Module):
    """An attention layer of flash-linear-attention, its residual and the norm after it: hidden [B, N, C] -> the same.

    plain: compute it in plain PyTorch, as a reference.
    """

    updates = False

    def __init__(self, shape: Shape, kind: str, plain: bool):
        super().__init__()
        import fla.layers

        if shape.num_heads * shape.head_dim != shape.hidden_size:
            raise ValueError(f"Shape {shape.name!r} has heads that do not fill its width, which {kind!r} needs.")
        layer = getattr(fla.layers, FLA[kind])
        self.kind, self.plain = kind, plain
        self.input_size = shape.hidden_size
        self.layer = layer(shape.hidden_size, shape.num_heads, shape.num_kv_heads, layer_idx=0)
        self.norm = RMSNorm(shape.hidden_size, 1e-6)

    def initial_state(self, hidden: Tensor) -> None:
        """It has no state."""

    def forward(self, hidden: Tensor, state: None) -> tuple[Tensor]:
        output = plain_attention(self.layer, self.kind, hidden) if self.plain else self.layer(hidden)[0]
        return (self.norm(hidden + output),)


def plain_attention(layer: Any, kind: str, hidden: Tensor) -> Tensor:
    """What a layer of flash-linear-attention computes, in plain PyTorch with quadratic memory."""
    query, key, value = (
        project(hidden).unflatten(-1, (-1, layer.head_dim)).transpose(1, 2)
        for project in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    if kind == "fla-rope":
        ids = torch.arange(hidden.shape[1], device=hidden.device)[None]
        half = layer.head_dim // 2
        frequencies = layer.rope_theta ** -(torch.arange(half, device=hidden.device, dtype=torch.float64) / half)
        query, key = apply_rotary(query, key, phasors(ids.double(), frequencies, hidden.dtype))
    ratio = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(ratio, dim=1), value.repeat_interleave(ratio, dim=1)
    scores = path_scores(layer, hidden, query, key) if kind == "fla-path" else query @ key.transpose(-1, -2)
    scores = scores * layer.head_dim**-0.5
    if kind == "fla-fox":
        total = nn.functional.logsigmoid(layer.f_proj(hidden)).transpose(1, 2).cumsum(-1)
        scores = scores + (total[..., None] - total[..., None, :])
    scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
    return layer.o_proj((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))


def path_scores(layer: Any, hidden: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """PaTH's scores [B, H, N, N]: k_j goes through I - beta_t w_t w_t^T for every t from j + 1 to i, then meets q_i.

    query, key: [B, H, N, D].
    """
    direction = layer.w_proj(hidden)
    convolution = layer.w_conv1d
    size = convolution.kernel_size[0]
    padded = nn.functional.pad(direction.transpose(1, 2), (size - 1, 0))
    direction = nn.functional.conv1d(padded, convolution.weight, groups=direction.shape[-1]).transpose(1, 2)
    direction = nn.functional.silu(direction).unflatten(-1, (-1, layer.head_dim)).transpose(1, 2)
    direction = direction / (direction.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    strength = 2 * layer.bt_proj(hidden).sigmoid().transpose(1, 2)
    direction = direction * strength[..., None].sqrt()
    own = torch.arange(hidden.shape[1], device=hidden.device)[None]
    ratio = key.shape[1] // direction.shape[1]
    return query @ key.transpose(-1, -2) + reflected_products(query, key, direction.repeat_interleave(ratio, 1), own)
