"""Adapter files: bit for bit there and back, refused when they do not fit, never half-written."""

import errno
import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from cases import build, draw_tokens, gap
from equitape import EquitapeForCausalLM, adapt, load_adapter
from equitape.adapt import METHODS, merge_lora, save_adapter
from equitape.pretrained import adapter as adapter_module
from equitape.pretrained import adapting
from equitape.pretrained.longlora import ShiftedSparseAttention
from families import make_source

TOKENS = draw_tokens(2, 20)


def logits(model):
    with torch.no_grad():
        return model(TOKENS).logits


def train(model, seed=3):
    """Stand in for training: every trained tensor gets other values."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            # not in place: a loaded base may share the tensor
            parameter.data = parameter.data + (0.1 * torch.randn(parameter.shape, generator=generator)).to(parameter)
    return model


@pytest.fixture(params=METHODS)
def method(request):
    return request.param


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bit_for_bit(method, dtype, tmp_path):
    model = train(adapt(make_source("qwen2", dtype), method, context=128))
    model.save_adapter(tmp_path / "adapter")
    base = make_source("qwen2", dtype)
    again = load_adapter(base, tmp_path / "adapter")
    assert type(again) is type(model)
    assert not again.training
    ours, theirs = dict(model.named_parameters()), dict(again.named_parameters())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert [p.requires_grad for p in ours.values()] == [p.requires_grad for p in theirs.values()]
    assert torch.equal(logits(again), logits(model))
    assert gap(logits(again), logits(make_source("qwen2", dtype))) > 1e-2
    # the loaded base is as it was
    assert all(
        torch.equal(a, b) for a, b in zip(base.parameters(), make_source("qwen2", dtype).parameters(), strict=True)
    )


def test_only_trained_tensors_are_written(method, tmp_path):
    model = adapt(make_source(), method)
    save_adapter(model, tmp_path)
    tensors = load_file(tmp_path / "adapter.safetensors")
    assert set(tensors) == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert sorted(file.name for file in tmp_path.iterdir()) == ["README.md", "adapter.json", "adapter.safetensors"]
    described = json.loads((tmp_path / "adapter.json").read_text())
    assert described["format"] == 1
    assert described["method"] == method
    assert described["tensors"]["count"] == len(tensors)
    assert set(described["versions"]) >= {"equitape", "torch", "transformers", "peft"}


def test_from_a_path_and_in_another_dtype(tmp_path):
    """The fingerprint of a base is the same in float32 and bfloat16; tensors are rounded to what is asked for."""
    make_source(dtype=torch.bfloat16).save_pretrained(tmp_path / "base")
    model = train(adapt(tmp_path / "base", "tape", dtype="float32"))
    model.save_adapter(tmp_path / "adapter")
    wide = load_adapter(str(tmp_path / "base"), str(tmp_path / "adapter"), dtype=torch.float32)
    assert torch.equal(logits(wide), logits(model))
    half = load_adapter(tmp_path / "base", tmp_path / "adapter")
    assert all(parameter.dtype == torch.bfloat16 for parameter in half.parameters())
    assert all(torch.equal(a.bfloat16(), b) for a, b in zip(model.parameters(), half.parameters(), strict=True))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"seed": 1}, "it has the same sizes but different weights"),
        ({"num_hidden_layers": 4}, "its num_hidden_layers is 4, not 3"),
        ({"tie_word_embeddings": True}, "its tie_word_embeddings is True, not False"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, "its encoding is .*7.0.*, not"),
        ({"rms_norm_eps": 1e-3}, "its rms_norm_eps is"),
    ],
)
def test_another_base_is_refused(changes, reason, tmp_path):
    adapt(make_source(), "tape").save_adapter(tmp_path)
    with pytest.raises(ValueError, match=f"was trained on 'llama'; 'llama' is a different base: {reason}"):
        load_adapter(make_source(**changes), tmp_path)


def test_one_changed_norm_makes_another_base(tmp_path):
    adapt(make_source(), "lora").save_adapter(tmp_path)
    base = make_source()
    base.model.layers[1].input_layernorm.weight.data[3] += 0.1
    with pytest.raises(ValueError, match="same sizes but different weights"):
        load_adapter(base, tmp_path)


def edit(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("changes", [{}, {"query_growth": 0.2}, {"query_growth_start": 7}])
def test_a_base_whose_queries_grow_otherwise_is_another(changes, tmp_path):
    growth = {"query_growth": 0.1, "query_growth_start": 5}
    save_adapter(train(adapt(build("tape", **growth), "lora")), tmp_path)
    with pytest.raises(ValueError, match="a different base: its query_growth"):
        load_adapter(build("tape", **(growth | changes if changes else {})), tmp_path)
    load_adapter(build("tape", **growth), tmp_path)
    # a start of queries that do not grow has no effect
    save_adapter(train(adapt(build("tape"), "lora")), tmp_path / "plain")
    load_adapter(build("tape", query_growth_start=7), tmp_path / "plain")


def test_damaged_and_foreign_files_are_refused(tmp_path):
    good = tmp_path / "good"
    adapt(make_source(), "tape").save_adapter(good)

    def attempt(change, message):
        bad = tmp_path / "bad"
        shutil.rmtree(bad, ignore_errors=True)
        shutil.copytree(good, bad)
        change(bad)
        with pytest.raises(ValueError, match=message):
            load_adapter(make_source(), bad)

    def drop_tensor(folder):
        tensors = load_file(folder / "adapter.safetensors")
        del tensors["model.layers.0.self_attn.encoding.carry"]
        save_file(tensors, folder / "adapter.safetensors")

    def add_tensor(folder):
        tensors = load_file(folder / "adapter.safetensors")
        save_file({**tensors, "model.extra": torch.ones(2)}, folder / "adapter.safetensors")

    def change_tensor(folder):
        tensors = load_file(folder / "adapter.safetensors")
        save_file({name: tensor + 1 for name, tensor in tensors.items()}, folder / "adapter.safetensors")

    attempt(drop_tensor, "lacks 1 tensors, for example 'model.layers.0.self_attn.encoding.carry'; its method trains 8")
    attempt(add_tensor, "also has 'model.extra'")
    attempt(change_tensor, "does not match adapter.json")
    attempt(lambda folder: (folder / "adapter.safetensors").write_bytes(b"x" * 99), "adapter.safetensors' is damaged")
    attempt(lambda folder: (folder / "adapter.safetensors").unlink(), "has no adapter.safetensors")
    attempt(lambda folder: (folder / "adapter.json").unlink(), "There is no adapter in .*: adapter.json is missing")
    attempt(lambda folder: (folder / "adapter.json").write_text("{"), "adapter.json' is damaged")
    attempt(lambda folder: edit(folder / "adapter.json", format=2, versions={"equitape": "9.1"}),
            "has format 2, written by equitape 9.1; this version reads formats up to 1. Upgrade")  # fmt: skip
    attempt(lambda folder: edit(folder / "adapter.json", method="magic"), "unknown method 'magic'")
    attempt(lambda folder: edit(folder / "adapter.json", settings={"method": "tape", "old": 1}), "has no option 'old'")
    with pytest.raises(ValueError, match="There is no adapter in"):
        load_adapter(make_source(), tmp_path / "nowhere")


def test_shapes_are_compared(tmp_path):
    adapt(make_source(), "tape").save_adapter(tmp_path)
    settings = json.loads((tmp_path / "adapter.json").read_text())["settings"]
    edit(tmp_path / "adapter.json", settings={**settings, "tape": {"mixer_size": 5}})
    with pytest.raises(ValueError, match=r"of shape \[8, 2\]; the model's is \[5, 2\]"):
        load_adapter(make_source(), tmp_path)


def fail_to_write(*args, **kwargs):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("broken", ["save_file", "adapter_card"])
def test_no_space_left(broken, old, tmp_path, monkeypatch):
    """What was there before is still whole, and nothing new is there."""
    target = tmp_path / "adapter"
    model = adapt(make_source(), "tape")
    if old:
        model.save_adapter(target)
    train(model)
    with monkeypatch.context() as patch:
        patch.setattr(adapter_module, broken, fail_to_write)
        with pytest.raises(OSError, match=r"Cannot write to .*adapter' \(No space left on device\); nothing there"):
            model.save_adapter(target)
    assert [entry.name for entry in tmp_path.iterdir()] == (["adapter"] if old else [])
    if old:
        assert torch.equal(logits(load_adapter(make_source(), target)), logits(adapt(make_source(), "tape")))
    model.save_adapter(target)
    assert torch.equal(logits(load_adapter(make_source(), target)), logits(model))


def test_a_full_disk_while_safetensors_writes(tmp_path):
    """/dev/full refuses every byte, as a full disk does."""
    if not os.path.exists("/dev/full"):
        pytest.skip("there is no /dev/full here")
    model = adapt(make_source(), "tape")

    def save_to_full_disk(tensors, path, **kwargs):
        os.symlink("/dev/full", path)
        with open(path, "wb", buffering=0) as file:
            file.write(b"x")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapter_module, "save_file", save_to_full_disk)
        with pytest.raises(OSError, match="No space left on device"):
            model.save_adapter(tmp_path / "adapter")
    assert list(tmp_path.iterdir()) == []


def test_whole_models_are_not_half_written_either(tmp_path, monkeypatch):
    model = adapt(make_source(), "tape")
    monkeypatch.setattr(adapting, "model_card", fail_to_write)
    with pytest.raises(OSError, match="nothing there was changed"):
        model.save_pretrained(tmp_path / "whole")
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "adapter").write_text("mine")
    with pytest.raises(ValueError, match="is a file; give the path of a folder"):
        adapt(make_source(), "tape").save_adapter(tmp_path / "adapter")
    assert (tmp_path / "adapter").read_text() == "mine"


@pytest.mark.parametrize("case", ["llama-tied", "qwen2"])
@pytest.mark.parametrize("method", ["lora", "tape+lora", "longlora"])
def test_merging(case, method, tmp_path):
    source = make_source(case)
    model = train(adapt(source, method))
    expected = logits(model)
    assert gap(expected, logits(source)) > 1e-2
    assert merge_lora(model) == 12
    assert not any("lora" in name for name, _ in model.named_modules())
    assert gap(logits(model), expected) < 1e-5
    assert gap(logits(source), logits(make_source(case))) == 0
    assert merge_lora(model) == 0
    with pytest.raises(
        ValueError, match=r"LoRA was merged into its weights. Save the full model with model.save_pretrained"
    ):
        model.save_adapter(tmp_path)


@pytest.mark.parametrize("case", ["llama-tied", "qwen2"])
def test_whole_models_reload(method, case, tmp_path):
    """Saved with LoRA still apart, which stays so."""
    model = train(adapt(make_source(case), method, context=128))
    before = {name for name, _ in model.named_parameters()}
    model.save_pretrained(tmp_path)
    assert {name for name, _ in model.named_parameters()} == before
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["EquitapeForCausalLM"]
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is EquitapeForCausalLM
    assert gap(logits(again), logits(model)) < 1e-5
    assert again.config.max_position_embeddings == 128
    wanted = {"max_new_tokens": 5, "do_sample": False}
    assert torch.equal(again.generate(TOKENS[:1], **wanted), model.generate(TOKENS[:1], **wanted))


def test_a_whole_model_trains_with_all_of_its_attention(tmp_path):
    model = adapt(make_source("llama"), "longlora", context=128)
    model.save_pretrained(tmp_path)
    assert model.model.training_attention == ShiftedSparseAttention(32)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).model.training_attention is None


def test_model_cards(tmp_path):
    model = adapt(make_source("mistral"), "longlora", context=128, lora_rank=2)
    model.adaptation.training = {
        "data": "three books", "steps": 7, "final_loss": 1 / 3, "settings": {"learning_rate": 0.001},
    }  # fmt: skip
    model.save_adapter(tmp_path / "adapter")
    model.save_pretrained(tmp_path / "whole")
    for folder, loading in (("adapter", "load_adapter("), ("whole", "AutoModelForCausalLM")):
        card = (tmp_path / folder / "README.md").read_text()
        for text in (loading, "base_model: mistral", "longlora", "128 tokens", "| data | three books |", "lora_rank 2",
                     "| steps | 7 |", "learning_rate 0.001", "torch"):  # fmt: skip
            assert text in card
        # options that have no effect are left out, and numbers are short
        assert "| positions | kind rope, theta 10000 |" in card
        assert "lora_targets q_proj k_proj v_proj o_proj" in card
        assert "| final_loss | 0.333333 |" in card
    again = load_adapter(make_source("mistral"), tmp_path / "adapter")
    assert again.adaptation.training == model.adaptation.training
    untrained = adapt(make_source(), "tape", scaling="yarn", context=256)
    untrained.save_adapter(tmp_path / "untrained")
    card = (tmp_path / "untrained" / "README.md").read_text()
    assert "Not trained with this package yet" in card
    length = untrained.config.encoding["scaling"]["original_max_positions"]
    factor = 256 / length
    assert f"theta 10000, scaling kind yarn, factor {factor:g}, original_max_positions {length} |" in card


def test_a_model_that_was_not_adapted(tmp_path):
    with pytest.raises(ValueError, match=r"was not made by equitape.adapt, so it has no adapter"):
        save_adapter(build("tape"), tmp_path)


def test_an_adapter_from_the_hub(tmp_path, monkeypatch):
    model = adapt(make_source(), "lora")
    model.save_adapter(tmp_path / "fetched")
    asked = []

    def fetch(name, allow_patterns):
        asked.append((name, sorted(allow_patterns)))
        return str(tmp_path / "fetched")

    monkeypatch.setattr("equitape.pretrained.adapting.snapshot_download", fetch)
    again = load_adapter(make_source(), "someone/adapter")
    assert asked == [("someone/adapter", ["adapter.json", "adapter.safetensors"])]
    assert again.adaptation.trained == model.adaptation.trained
    monkeypatch.undo()
    # the tests are offline
    with pytest.raises(ValueError, match="There is no adapter in 'someone/nowhere': there is no such folder, and"):
        load_adapter(make_source(), "someone/nowhere")
