"""Small models of every family with random weights, to adapt."""

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from cases import VOCAB, randomise

SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SOME_LAYERS = ["full_attention", "sliding_attention", "full_attention"]
FIRST_LAYERS_SLIDE = ["sliding_attention", "full_attention", "full_attention"]
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
    "smollm3": (SmolLM3Config, SmolLM3ForCausalLM, {"no_rope_layer_interval": 2, "tie_word_embeddings": True}),
    "smollm3-windows": (
        SmolLM3Config, SmolLM3ForCausalLM,
        {"no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 6, "attention_bias": True},
    ),
    "olmo2": (Olmo2Config, Olmo2ForCausalLM, {}),
    "phi3": (Phi3Config, Phi3ForCausalLM, {"num_attention_heads": 4}),
    "phi3-window": (Phi3Config, Phi3ForCausalLM, {"sliding_window": 7, "tie_word_embeddings": True}),
    "gemma2": (
        Gemma2Config, Gemma2ForCausalLM,
        {"head_dim": 16, "query_pre_attn_scalar": 20, "sliding_window": 6, "attn_logit_softcapping": 2.0,
         "final_logit_softcapping": 3.0, "attn_implementation": "eager"},
    ),
    "gemma2-uncapped": (
        Gemma2Config, Gemma2ForCausalLM, {"head_dim": 8, "sliding_window": 6, "attn_logit_softcapping": None},
    ),
    "gemma3": (
        Gemma3TextConfig, Gemma3ForCausalLM,
        {"head_dim": 16, "query_pre_attn_scalar": 20, "sliding_window": 6, "layer_types": FIRST_LAYERS_SLIDE,
         "rope_parameters": {
             "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
             "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e5},
         }},
    ),
    "mixtral": (MixtralConfig, MixtralForCausalLM, {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-moe": (
        Qwen3MoeConfig, Qwen3MoeForCausalLM,
        {"head_dim": 16, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True},
    ),
    "qwen3-moe-dense-layers": (
        Qwen3MoeConfig, Qwen3MoeForCausalLM,
        {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "mlp_only_layers": [1]},
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
