"""Families beyond Llama: what is saved, trained and refused. That logits are the same: test_weights.py."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, Phi3Config

from cases import draw_tokens, gap
from equitape import EquitapeConfig, EquitapeForCausalLM, adapt
from equitape.model.preparation import common_scale
from equitape.pretrained.families import translate_config
from equitape.scale.costs import ModelCosts
from families import SIZES, make_source

TOKENS = draw_tokens(2, 30)
NEW = ["smollm3", "olmo2", "phi3", "gemma2", "gemma3", "mixtral", "qwen3-moe-dense-layers"]


@pytest.mark.parametrize("case", NEW)
def test_a_folder_is_the_same_model(case, tmp_path):
    model = adapt(make_source(case), "tape+lora", context=128)
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "encoding" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    model.save_pretrained(tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert type(loaded) is EquitapeForCausalLM
    with torch.no_grad():
        assert gap(loaded(TOKENS).logits, model(TOKENS).logits) < 1e-5
        assert gap(loaded(TOKENS).logits, make_source(case)(TOKENS).logits) > 1e-3


@pytest.mark.parametrize("case", NEW)
def test_the_cache_continues(case):
    """Token by token and in chunks, past every window, with TAPE's weights random."""
    model = adapt(make_source(case), "tape")
    for name, parameter in model.named_parameters():
        if "encoding" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    with torch.no_grad():
        wanted = model(TOKENS).logits
        past, parts = None, []
        for start, end in ((0, 9), (9, 10), (10, 11), (11, 24), (24, 30)):
            output = model(TOKENS[:, start:end], past_key_values=past, use_cache=True)
            past = output.past_key_values
            parts.append(output.logits)
    assert gap(torch.cat(parts, 1), wanted) < 1e-5


def test_yarn_leaves_layers_without_positions_alone():
    """YaRN's factor on scores is part of the rotation, which some layers of SmolLM3 lack."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
    source = make_source("smollm3", rope_parameters=yarn, max_position_embeddings=256)
    model = adapt(source, "lora")
    with torch.no_grad():
        assert gap(model(TOKENS).logits, source(TOKENS).logits) < 1e-5
    with pytest.raises(ValueError, match="whose layers scale their scores differently"):
        common_scale(model.model, "This", "stop")
    assert common_scale(adapt(make_source("smollm3"), "lora").model, "This", "stop") == model.config.head_dim**-0.5


@pytest.mark.parametrize("case", NEW)
def test_estimates_count_all_weights(case):
    source = make_source(case)
    assert ModelCosts(translate_config(source.config)).parameters == source.num_parameters()


def test_layers_with_a_window_keep_their_rope_in_gemma_3():
    source = make_source("gemma3")
    config = adapt(source, "theta+tape+lora", context=512, theta=1e7).config
    assert config.encoding["kind"] == "tape"
    assert config.encoding["theta"] == 1e7
    assert config.local_encoding["theta"] == 100.0
    assert config.local_layers == [0]
    # the value of a layer with RoPE carries no field, nor does that of the last layer
    assert config.value_cache_dims == [16, 32, 16]


def test_new_weights_of_experts_and_norms_are_drawn():
    torch.manual_seed(0)
    experts = translate_config(make_source("mixtral").config)
    model = EquitapeForCausalLM(EquitapeConfig.from_dict({**experts.to_dict(), "norm_offset": 1.0}))
    mixture = model.model.layers[0].mlp
    assert mixture.experts.gate_up_proj.std().item() == pytest.approx(0.02, rel=0.2)
    assert mixture.gate.weight.std().item() == pytest.approx(0.02, rel=0.5)
    assert (model.model.norm.weight == 0).all()


def test_refusals_name_what_is_missing():
    scaled = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "rope_theta": 1e4}
    with pytest.raises(ValueError, match="scales its rotary positions by 'longrope'; supported: default, linear"):
        translate_config(Phi3Config(**SIZES, rope_parameters=scaled))
    with pytest.raises(ValueError, match="drops out residuals or embeddings"):
        translate_config(Phi3Config(**SIZES, resid_pdrop=0.1))
    with pytest.raises(ValueError, match="attends in both directions and is not a decoder"):
        translate_config(Gemma3TextConfig(**SIZES, use_bidirectional_attention=True))
    capped = adapt(make_source("gemma2"), "lora").config
    with pytest.raises(
        ValueError, match=r"bounds its attention scores .*, which 'sdpa' cannot; use attn_implementation"
    ):
        EquitapeForCausalLM._from_config(capped, attn_implementation="sdpa")
    with pytest.raises(ValueError, match="A clock keeps its sum in layer 0, which has local_encoding here"):
        EquitapeConfig(
            sliding_window=8,
            sliding_layers=[0],
            encoding={"kind": "tape", "clock": True},
            local_encoding={"kind": "rope"},
        )
    with pytest.raises(ValueError, match="norms is 'around'; it must be before, after or both"):
        EquitapeConfig(norms="around")


@pytest.mark.parametrize(
    "local", ["alibi", "fox", "t5", "cope", "learned", "sinusoidal", "randpe", {"kind": "rope", "clock": True}]
)
def test_layers_with_a_window_refuse_encodings_that_the_model_does_not_prepare(local):
    window = {"sliding_window": 8, "sliding_layers": [0]}
    with pytest.raises(ValueError, match="cannot serve some of the layers"):
        EquitapeConfig(**window, encoding="rope", local_encoding=local)
    scaling = {"kind": "dynamic", "factor": 2.0, "original_max_positions": 8}
    with pytest.raises(ValueError, match="local_encoding 'rope' with these options cannot be cached: dynamic NTK"):
        EquitapeConfig(**window, encoding="tape2", local_encoding={"kind": "rope", "scaling": scaling})
    slopes = {"kind": "rope", "decay": "slopes"}
    assert EquitapeConfig(**window, encoding="tape2", local_encoding=slopes).local_encoding["decay"] == "slopes"
