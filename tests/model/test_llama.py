"""The decoder against transformers' own Llama, Mistral, Qwen2 and Qwen3 with the same weights.

In float64: in float32 both are up to 1.6e-5 from it, by other amounts on other processors. transformers computes angles
in float32 even then, and only that is left.
"""

import pytest
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

from cases import VOCAB, build, draw_tokens, gap, tiny_config
from equitape import EquitapeForCausalLM

SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
TOKENS = draw_tokens(2, 50)
THETA = {"rope_theta": 10000.0}
SCALINGS = {
    "default": ({}, {"rope_type": "default", **THETA}),
    "linear": ({"kind": "linear", "factor": 2.0}, {"rope_type": "linear", "factor": 2.0, **THETA}),
    "yarn": (
        {"kind": "yarn", "factor": 4.0, "original_max_positions": 16},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, **THETA},
    ),
    "llama3": (
        {"kind": "llama3", "factor": 4.0, "original_max_positions": 16},
        {"rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 16, "low_freq_factor": 1.0,
         "high_freq_factor": 4.0, **THETA},
    ),
    "dynamic": (
        {"kind": "dynamic", "factor": 2.0, "original_max_positions": 64},
        {"rope_type": "dynamic", "factor": 2.0, **THETA},
    ),
}  # fmt: skip


def assert_equal_logits(theirs, kind="rope", options=None, limit=1e-5, tokens=TOKENS, **changes):
    """Same weights by name, same logits, padded and not."""
    ours = build(kind, options, **changes)
    theirs = theirs.double().eval()
    weights = {name: weight for name, weight in ours.state_dict().items() if "encoding" not in name}
    theirs.load_state_dict(weights)
    mask = torch.ones_like(tokens)
    mask[1, :9] = 0
    ids = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        assert gap(ours(tokens).logits, theirs(tokens).logits) < limit
        found = ours(tokens, attention_mask=mask).logits[mask.bool()]
        expected = theirs(tokens, attention_mask=mask, position_ids=ids).logits[mask.bool()]
    assert gap(found, expected) < limit


@pytest.mark.parametrize("name", SCALINGS)
def test_llama(name):
    ours, parameters = SCALINGS[name]
    # angles in float32 alone make 1.7e-5 with these weights
    limit = 2e-5 if name == "llama3" else 1e-5
    theirs = LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=parameters))
    assert_equal_logits(theirs, options={"scaling": ours}, limit=limit)


def test_llama_beyond_the_length_of_dynamic_ntk():
    ours, parameters = SCALINGS["dynamic"]
    model = LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=parameters))
    weights = build("rope", {"scaling": ours})
    model.double().load_state_dict(weights.state_dict())
    tokens = draw_tokens(1, 90)
    with torch.no_grad():
        assert gap(weights(tokens).logits, model.eval()(tokens).logits) < 1e-5


@pytest.mark.parametrize("options", [{}, {"complex_mixing": True}, {"scaling": SCALINGS["yarn"][0]}])
def test_tape_at_its_start_is_llama(options):
    """The update weights are zero when a model is made, so a pretrained checkpoint keeps its outputs."""
    parameters = SCALINGS["yarn"][1] if "scaling" in options else SCALINGS["default"][1]
    theirs = LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=parameters)).double().eval()
    ours = EquitapeForCausalLM(tiny_config("tape", options)).double().eval()
    trunk = build("rope").state_dict()
    theirs.load_state_dict(trunk)
    missing, unexpected = ours.load_state_dict(trunk, strict=False)
    assert missing
    assert all("encoding" in name for name in missing)
    assert not unexpected
    with torch.no_grad():
        assert gap(ours(TOKENS).logits, theirs(TOKENS).logits) < 1e-5


def test_attention_and_mlp_biases():
    theirs = LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True))
    assert_equal_logits(theirs, attention_bias=True, mlp_bias=True)


def test_mistral_with_a_sliding_window():
    assert_equal_logits(MistralForCausalLM(MistralConfig(**SIZES, sliding_window=7)), sliding_window=7)


def test_qwen2_with_biases_on_q_k_v_and_windows_in_some_layers():
    theirs = Qwen2ForCausalLM(
        Qwen2Config(
            **SIZES, use_sliding_window=True, sliding_window=7,
            layer_types=["full_attention", "sliding_attention", "full_attention"],
        )
    )  # fmt: skip
    assert_equal_logits(theirs, attention_bias=True, attention_output_bias=False, sliding_window=7, sliding_layers=[1])


def test_qwen3_with_norms_on_queries_and_keys():
    assert_equal_logits(Qwen3ForCausalLM(Qwen3Config(**SIZES)), qk_norm=True)
