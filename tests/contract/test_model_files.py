"""Saving and loading: bit for bit, through the Auto classes, and never with weights left random."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from cases import CASES, build, draw_tokens, tiny_config
from equitape import EquitapeForCausalLM, EquitapeForSequenceClassification, EquitapeModel


@pytest.mark.parametrize("case", CASES)
def test_round_trip_is_bit_identical(case, tmp_path):
    model = build(case, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is EquitapeForCausalLM
    assert loaded.config.encoding == model.config.encoding
    weights, others = model.state_dict(), loaded.state_dict()
    assert weights.keys() == others.keys()
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    tokens = draw_tokens(1, 8)
    torch.manual_seed(5)
    expected = model(tokens).logits
    torch.manual_seed(5)
    assert torch.equal(loaded(tokens).logits, expected)


def test_config_spells_the_encoding_out(tmp_path):
    build("tape").save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["encoding"]["kind"] == "tape"
    assert saved["encoding"]["theta"] == 10000.0
    assert AutoConfig.from_pretrained(tmp_path).encoding == saved["encoding"]


def test_tied_embeddings_are_saved_once(tmp_path):
    model = build("tape", dtype=torch.float32, tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    loaded = EquitapeForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    tokens = draw_tokens(1, 8)
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)


def test_checkpoint_of_another_encoding_is_refused(tmp_path):
    build("rope", dtype=torch.float32).save_pretrained(tmp_path / "rope")
    build("tape", dtype=torch.float32).save_pretrained(tmp_path / "tape")
    tape, rope = (AutoConfig.from_pretrained(tmp_path / kind) for kind in ("tape", "rope"))
    with pytest.raises(ValueError, match=r"lacks \d+ of the model's weights: .*encoding"):
        EquitapeForCausalLM.from_pretrained(tmp_path / "rope", config=tape)
    with pytest.raises(ValueError, match="weights of another encoding"):
        EquitapeForCausalLM.from_pretrained(tmp_path / "tape", config=rope)


def drop_tensor(folder, name):
    weights = load_file(folder / "model.safetensors")
    del weights[name]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("lost", ["model.layers.1.mlp.up_proj.weight", "lm_head.weight"])
def test_missing_weights_are_refused_unless_asked_for(lost, tmp_path):
    build("tape", dtype=torch.float32).save_pretrained(tmp_path)
    drop_tensor(tmp_path, lost)
    with pytest.raises(ValueError, match=lost):
        EquitapeForCausalLM.from_pretrained(tmp_path)
    _, info = EquitapeForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert info["missing_keys"] == {lost}


def test_a_new_head_on_a_pretrained_decoder_is_allowed(tmp_path):
    model = build("tape", dtype=torch.float32)
    model.save_pretrained(tmp_path)
    classifier = EquitapeForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
    base = EquitapeModel.from_pretrained(tmp_path)
    tokens = draw_tokens(1, 8)
    assert classifier(tokens).logits.shape == (1, 3)
    assert torch.equal(base(tokens).last_hidden_state, model.model(tokens).last_hidden_state)


def test_a_head_lost_from_its_own_checkpoint_is_refused(tmp_path):
    EquitapeForSequenceClassification(tiny_config("tape", num_labels=3)).save_pretrained(tmp_path)
    drop_tensor(tmp_path, "score.weight")
    with pytest.raises(ValueError, match=r"lacks 1 of the model's weights: 'score.weight'"):
        EquitapeForSequenceClassification.from_pretrained(tmp_path)


def test_a_decoder_without_a_language_modelling_head_is_refused_as_a_language_model(tmp_path):
    EquitapeModel(tiny_config("rope")).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"'lm_head.weight'"):
        EquitapeForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("case", CASES)
def test_a_model_made_from_no_file_is_initialised(case):
    """Weights with a fixed start have it, and the others have about the spread of a new model's."""
    config = tiny_config(case)
    first, second = (EquitapeForCausalLM(config).state_dict() for _ in range(2))
    found = EquitapeForCausalLM.from_pretrained(None, config=config, state_dict={}).state_dict()
    assert found.keys() == first.keys()
    for name, weight in found.items():
        if torch.equal(first[name], second[name]):
            assert torch.equal(weight, first[name]), name
        else:
            assert 0.2 < (weight.norm() / first[name].norm()).item() < 5, name


@pytest.mark.parametrize("case", CASES)
def test_a_missing_weight_changes_no_other(case, tmp_path):
    model = build(case, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    weights = model.state_dict()
    lost = next((name for name in weights if ".encoding." in name), "model.norm.weight")
    drop_tensor(tmp_path, lost)
    loaded, info = EquitapeForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert info["missing_keys"] == {lost}
    assert [name for name, weight in loaded.state_dict().items() if not torch.equal(weight, weights[name])] == [lost]


def test_scalars_of_version_0_1_are_read(tmp_path):
    model = build("fire", dtype=torch.float32)
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    scalars = [name for name in weights if name.endswith((".c", ".threshold_factor"))]
    assert len(scalars) == 2 * model.config.num_hidden_layers
    old = {name: weight.reshape(()) if name in scalars else weight for name, weight in weights.items()}
    save_file(old, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = EquitapeForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(weight, loaded.state_dict()[name]) for name, weight in model.state_dict().items())
    # a checkpoint of Trainer is read by torch
    fresh = build("fire", dtype=torch.float32, seed=1)
    fresh.load_state_dict(old)
    assert all(torch.equal(weight, fresh.state_dict()[name]) for name, weight in model.state_dict().items())
    # and what is saved again has the new shapes
    loaded.save_pretrained(tmp_path / "again")
    assert all(load_file(tmp_path / "again" / "model.safetensors")[name].shape == (1,) for name in scalars)
