"""Small models of every family with random weights, to adapt."""

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from cases import VOCAB, randomise

SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SOME_LAYERS = ["full_attention", "sliding_attention", "full_attention"]
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "llama-biases": (LlamaConfig, LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True}),
    "llama-one-key-head": (LlamaConfig, LlamaForCausalLM, {"num_key_value_heads": 1, "hidden_act": "gelu"}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None, "head_dim": 16}),
    "mistral-window": (MistralConfig, MistralForCausalLM, {"sliding_window": 7, "rms_norm_eps": 1e-5}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen2-windows": (
        Qwen2Config, Qwen2ForCausalLM,
        {"use_sliding_window": True, "sliding_window": 7, "layer_types": SOME_LAYERS},
    ),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16}),
    "qwen3-windows": (
        Qwen3Config, Qwen3ForCausalLM,
        {"head_dim": 8, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "attention_bias": True},
    ),
}  # fmt: skip


def make_source(case="llama", dtype=torch.float32, seed=0, **changes):
    """A transformers model with every weight random, norms and biases too."""
    config_class, model_class, own = FAMILIES[case]
    model = model_class(config_class(**{**SIZES, **own, **changes}))
    randomise(model, seed)
    for parameter in model.parameters():
        # the matrices of `randomise` make logits several times those of a real model, and rounding errors with them
        parameter.data *= 0.7 if parameter.dim() > 1 else 1.0
        # not model.to: that would round the original's rotary frequencies too, which loading it does not
        parameter.data = parameter.data.to(dtype)
    return model.eval()
