"""Adapted models in their base's own architecture: transformers alone computes the same."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from cases import draw_tokens, gap
from equitape import EquitapeConfig, EquitapeForCausalLM, adapt
from equitape.data.tokenizers import byte_tokenizer
from equitape.pretrained.native import check_native, save_native
from families import FAMILIES, make_source

TOKENS = draw_tokens(2, 30)


def trained(source, method="theta+lora", **options):
    """An adapted model whose trained weights are random."""
    model = adapt(source, method, **options)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    return model


@pytest.mark.parametrize("case", FAMILIES)
def test_transformers_computes_the_same(case, tmp_path):
    source = make_source(case)
    before = {name: tensor.clone() for name, tensor in source.state_dict().items()}
    # Gemma 3 has a scaling already, and Phi-3 takes none but its own
    options = {"theta": 5e4} if case.startswith(("gemma3", "phi3")) else {"scaling": "yarn", "theta": 2e4}
    model = trained(source, context=256, **options)
    save_native(source, model, None, tmp_path / "native")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "native")
    assert type(loaded) is type(source)
    assert loaded.config.max_position_embeddings == 256
    with torch.no_grad():
        assert gap(loaded(TOKENS).logits, model(TOKENS).logits) < 1e-5
        assert gap(loaded(TOKENS).logits, source(TOKENS).logits) > 1e-3
    # the base stays as it was
    assert all(torch.equal(tensor, before[name]) for name, tensor in source.state_dict().items())
    assert source.config.max_position_embeddings == 64


@pytest.mark.parametrize("scaling", [None, "linear", "yarn"])
def test_every_scaling_is_written(scaling, tmp_path, capfd):
    model = trained(make_source(), "lora", context=128, **({"scaling": scaling} if scaling else {"theta": 3e6}))
    save_native(make_source(), model, None, tmp_path / "native")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "native")
    # transformers warns of keys that a kind of scaling does not have
    assert "Unrecognized" not in "".join(capfd.readouterr())
    assert ("original_max_position_embeddings" in loaded.config.rope_parameters) == (scaling == "yarn")
    with torch.no_grad():
        assert gap(loaded(TOKENS).logits, model(TOKENS).logits) < 1e-5


def test_llama_3_keeps_its_scaling(tmp_path):
    own = {"rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 16, "low_freq_factor": 1.0,
           "high_freq_factor": 4.0, "rope_theta": 1e4}  # fmt: skip
    source = make_source(rope_parameters=own)
    model = trained(source, context=128, theta=7e5)
    save_native(source, model, None, tmp_path / "native")
    kept = AutoConfig.from_pretrained(tmp_path / "native").rope_parameters
    assert kept == {**own, "rope_theta": 7e5}
    with torch.no_grad():
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "native")
        assert gap(loaded(TOKENS).logits, model(TOKENS).logits) < 2e-5


def test_all_weights_and_a_tokenizer(tmp_path):
    make_source("llama-tied").save_pretrained(tmp_path / "base")
    model = adapt(tmp_path / "base", "full", context=128)
    torch.manual_seed(2)
    for parameter in model.parameters():
        parameter.data += 0.01 * torch.randn_like(parameter)
    save_native(tmp_path / "base", model, byte_tokenizer(), tmp_path / "native")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "native")
    with torch.no_grad():
        assert gap(loaded(TOKENS).logits, model(TOKENS).logits) < 1e-5
    assert AutoTokenizer.from_pretrained(tmp_path / "native").model_max_length == 128
    card = (tmp_path / "native" / "README.md").read_text()
    assert "library_name: transformers" in card
    assert "all weights of a `LlamaForCausalLM`" in card
    assert "import equitape" not in card


@pytest.mark.parametrize(
    ("method", "options", "words"),
    [
        ("tape+lora", {}, "has no 'tape', so it cannot hold this model"),
        ("drope", {}, "has no 'nope'"),
        ("theta+lora", {"query_growth": 0.05}, r"cannot let queries grow .* \(query_growth 0.05\)"),
    ],
)
def test_what_the_architecture_lacks_is_refused(method, options, words, tmp_path):
    model = adapt(make_source(), method, context=128, **options)
    with pytest.raises(ValueError, match=words):
        save_native(make_source(), model, None, tmp_path / "native")
    assert not (tmp_path / "native").exists()


def test_positions_that_a_family_refuses_are_named(tmp_path):
    source = make_source("phi3")
    with pytest.raises(ValueError, match=r"does not take these positions \(.*longrope"):
        save_native(source, adapt(source, "lora", context=128, scaling="yarn"), None, tmp_path / "native")
    assert not (tmp_path / "native").exists()


def test_dynamic_scaling_and_our_own_models_are_refused(tmp_path):
    own = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    source = make_source(rope_parameters=own)
    with pytest.raises(ValueError, match="'dynamic', which begins at its own context"):
        save_native(source, adapt(source, "lora", context=128), None, tmp_path / "native")
    adapt(make_source(), "lora").save_pretrained(tmp_path / "ours")
    again = EquitapeForCausalLM.from_pretrained(tmp_path / "ours")
    with pytest.raises(ValueError, match="no other architecture to write it in"):
        save_native(again, adapt(again, "lora"), None, tmp_path / "native")


@pytest.mark.parametrize("part", [{"rotate_values": 1.0}, {"decay": "slopes"}, {"clock": True}])
def test_parts_of_rope_have_no_place_in_other_architectures(part):
    source = make_source()
    config = EquitapeConfig.from_dict({**adapt(source, "lora").config.to_dict(), "encoding": {"kind": "rope", **part}})
    with pytest.raises(ValueError, match=f"The base's own architecture has no {next(iter(part))}, so it cannot hold"):
        check_native(source.config, config)
