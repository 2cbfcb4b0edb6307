"""Adapted models against the originals: logits, generation, memory; and every way of giving a model."""

import json
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaForSequenceClassification

from cases import VOCAB, draw_tokens, gap
from equitape import EquitapeForCausalLM, adapt
from equitape.pretrained.loading import load_model
from equitape.pretrained.weights import digest_of
from families import FAMILIES, make_source

TOKENS = draw_tokens(2, 50)
ROPES = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "yarn-options": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 16.0, "beta_slow": 2.0,
        "attention_factor": 1.3, "truncate": False,
    },
    "yarn-mscale": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 0.7, "mscale_all_dim": 1.4,
    },
    "llama3": {
        "rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 16, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
}  # fmt: skip


def logits(model, tokens=TOKENS, **inputs):
    with torch.no_grad():
        return model(tokens, **inputs).logits


@pytest.mark.parametrize("method", ["tape", "lora", "tape+lora", "longlora", "full"])
@pytest.mark.parametrize("case", FAMILIES)
def test_the_same_logits(case, method):
    source = make_source(case)
    model = adapt(source, method)
    assert isinstance(model, EquitapeForCausalLM)
    assert not model.training
    expected = logits(source)
    assert expected.std() > 0.1
    assert gap(logits(model), expected) < 1e-5
    mask = torch.ones_like(TOKENS)
    mask[1, :9] = 0
    ids = (mask.cumsum(-1) - 1).clamp(min=0)
    padded = logits(source, attention_mask=mask, position_ids=ids)[mask.bool()]
    assert gap(logits(model, attention_mask=mask)[mask.bool()], padded) < 1e-5


@pytest.mark.parametrize("method", ["tape", "full"])
@pytest.mark.parametrize("case", FAMILIES)
def test_half_precision_is_as_close_as_the_original(case, method):
    """Against float32, at most twice the error of the original in bfloat16."""
    exact = logits(make_source(case))
    source = make_source(case, torch.bfloat16)
    model = adapt(source, method)
    assert all(parameter.dtype == torch.bfloat16 for parameter in model.parameters())
    theirs = (logits(source).float() - exact).square().mean().sqrt()
    ours = (logits(model).float() - exact).square().mean().sqrt()
    assert 0 < ours <= 2 * theirs


@pytest.mark.parametrize("case", FAMILIES)
def test_the_same_text(case):
    """Cached generation, greedy, past the windows."""
    source = make_source(case)
    model = adapt(source, "tape")
    prompt = draw_tokens(1, 6)
    wanted = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    expected = source.generate(prompt, attention_mask=torch.ones_like(prompt), **wanted)
    assert torch.equal(model.generate(prompt, attention_mask=torch.ones_like(prompt), **wanted), expected)


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling", "type"])
@pytest.mark.parametrize("name", ROPES)
def test_rope_scaling_is_kept_in_every_spelling(name, spelling, tmp_path):
    given = ROPES[name]
    source = make_source(rope_parameters={**given, "rope_theta": 500.0})
    source.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    if spelling != "rope_parameters":
        old = {key: value for key, value in config.pop("rope_parameters").items() if key != "rope_theta"}
        if spelling == "type":
            old["type"] = old.pop("rope_type")
        config.update(rope_scaling=old, rope_theta=500.0)
    path.write_text(json.dumps(config))
    method = "full" if name == "dynamic" else "tape"
    model = adapt(tmp_path, method)
    assert model.config.encoding["theta"] == 500.0
    assert model.config.encoding["scaling"]["kind"] == given["rope_type"]
    plain = make_source(rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    if name != "dynamic":
        assert gap(logits(plain), logits(source)) > 1e-3
    assert gap(logits(model), logits(source)) < 1e-5


@pytest.mark.parametrize("message", [{}, {"original_max_position_embeddings": 16}], ids=["alone", "with-another"])
def test_dynamic_scaling_past_its_length(message):
    """The length is the one that the model announces, whatever else its scaling says."""
    given = {**ROPES["dynamic"], **message, "rope_theta": 1000.0}
    source = make_source(rope_parameters=given, max_position_embeddings=20)
    model = adapt(source, "full", context=64)
    assert gap(logits(model), logits(source)) < 1e-5
    with pytest.raises(ValueError, match="the scaling cannot be 'dynamic'"):
        adapt(source, "tape")


@pytest.mark.parametrize("tied", [False, True])
def test_no_second_copy_of_the_weights(tied):
    source = make_source(tie_word_embeddings=tied)
    model = adapt(source, "tape+lora")
    theirs = {parameter.data_ptr() for parameter in source.parameters()}
    old = {name: p for name, p in model.named_parameters() if "encoding" not in name and "lora" not in name}
    assert {parameter.data_ptr() for parameter in old.values()} == theirs
    assert len(old) == len(list(source.parameters()))
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    # only the adapted model describes what trains
    assert all(parameter.requires_grad for parameter in source.parameters())
    assert not any(parameter.requires_grad for parameter in old.values())


def test_new_weights_depend_on_the_seed_alone():
    def new(seed, **options):
        torch.manual_seed(torch.randint(10**6, ()).item())
        model = adapt(make_source(**options), "tape+lora", seed=seed)
        return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}

    first, again, other = new(1), new(1), new(2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)
    drawn = [name for name in first if "lora_A" in name]
    assert drawn
    assert not any(torch.equal(first[name], other[name]) for name in drawn)
    half = new(1, dtype=torch.bfloat16)
    assert all(torch.equal(first[name].bfloat16(), half[name]) for name in first if "encoding" in name)


def test_fingerprints_read_all_parts_of_a_large_tensor():
    """A change in any eighth of it makes another base; where tensors are small, so does any value."""
    plain = {"a": torch.zeros(80, 100), "b": torch.zeros(40)}
    digests = {digest_of(plain)}
    for eighth in range(8):
        changed = plain["a"].clone()
        changed.view(-1)[1000 * eighth : 1000 * eighth + 1000] = 1
        digests.add(digest_of({**plain, "a": changed}))
    for place in range(40):
        changed = plain["b"].clone()
        changed[place] = 1
        digests.add(digest_of({**plain, "b": changed}))
    digests.add(digest_of({**plain, "a": plain["a"].view(100, 80)}))
    digests.add(digest_of({"a": plain["a"], "c": plain["b"]}))
    assert len(digests) == 1 + 8 + 40 + 2
    assert digest_of({"b": plain["b"].bfloat16(), "a": plain["a"].double()}) == digest_of(plain)


def test_settings_of_generation_come_along():
    source = make_source()
    source.generation_config.temperature = 0.3
    source.generation_config.eos_token_id = [2, 5]
    model = adapt(source, "tape")
    assert model.generation_config.temperature == 0.3
    assert model.generation_config.eos_token_id == [2, 5]
    assert (model.config.bos_token_id, model.config.pad_token_id) == (1, 0)


@pytest.mark.parametrize("shards", [None, "20KB"])
def test_a_folder(tmp_path, shards):
    source = make_source("qwen3", torch.bfloat16)
    source.save_pretrained(tmp_path, **({"max_shard_size": shards} if shards else {}))
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == bool(shards)
    model = adapt(str(tmp_path), "tape")
    assert model.dtype == torch.bfloat16
    assert torch.equal(model.lm_head.weight, source.lm_head.weight)
    wide = adapt(tmp_path, "tape", dtype="float32")
    assert wide.dtype == torch.float32
    assert gap(logits(wide), logits(source.float())) < 1e-5


def test_a_model_of_our_own(tmp_path):
    """A saved TAPE model takes LoRA on top, and keeps its field."""
    model = adapt(make_source(), "tape")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "encoding" in name:
                parameter.normal_(std=0.2)
    model.save_pretrained(tmp_path)
    again = adapt(tmp_path, "tape+lora")
    assert gap(logits(again), logits(model)) < 1e-6
    assert gap(logits(model), logits(make_source())) > 1e-3


def test_unsupported_architectures(tmp_path):
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=1, n_head=2))
    message = (
        r"Architecture 'gpt2' cannot be adapted. Supported: llama, mistral, qwen2, qwen3, smollm3, olmo2, phi3, gemma2"
    )
    with pytest.raises(ValueError, match=message):
        adapt(model)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        adapt(tmp_path)
    with pytest.raises(ValueError, match="has no language-modelling head"):
        adapt(LlamaForSequenceClassification(make_source().config))
    with pytest.raises(ValueError, match="Cannot adapt a Linear"):
        adapt(torch.nn.Linear(2, 2))


def test_rotary_positions_of_other_kinds():
    parameters = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "rope_theta": 1e4,
                  "original_max_position_embeddings": 32, "factor": 2.0}  # fmt: skip
    with pytest.raises(ValueError, match="scales its rotary positions by 'longrope'; supported: default, linear"):
        adapt(make_source(rope_parameters=parameters))
    source = make_source()
    source.config.rope_parameters["partial_rotary_factor"] = 0.5
    with pytest.raises(ValueError, match=r"partial_rotary_factor 0.5"):
        adapt(source)
    source.config.rope_parameters = {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_theta": 1e5}}
    with pytest.raises(ValueError, match="layers of this model have different rotary positions"):
        adapt(source)


def test_quantized_sources(tmp_path):
    source = make_source()
    source.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    quantized = {"quant_method": "gptq", "bits": 4}
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": quantized}))
    with pytest.raises(ValueError, match=r"quantized \(gptq\) and cannot be trained; give the unquantized model"):
        adapt(tmp_path)
    source.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(
        torch.zeros(48, 32, dtype=torch.int8), requires_grad=False
    )
    with pytest.raises(ValueError, match=r"up_proj.weight' is quantized \(torch.int8\) and cannot be trained"):
        adapt(source)


def test_sources_with_adapters_of_others():
    from peft import LoraConfig, get_peft_model

    wrapped = get_peft_model(make_source(), LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match=r"PeftModel.*merge_and_unload"):
        adapt(wrapped)
    with pytest.raises(ValueError, match="quantized or has an adapter"):
        adapt(wrapped.base_model.model)
    assert adapt(wrapped.merge_and_unload())


def test_weights_that_are_not_there(tmp_path):
    source = make_source()
    with torch.device("meta"):
        source.model.norm.weight = torch.nn.Parameter(torch.empty(32))
    with pytest.raises(ValueError, match=r"'model.norm.weight' is not in memory"):
        adapt(source)
    make_source().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    weights["model.norm.weight"] = torch.ones(16)
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises((ValueError, RuntimeError)):
        adapt(tmp_path)


@pytest.mark.parametrize("lost", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"])
@pytest.mark.parametrize(
    "load", [adapt, partial(load_model, dtype="auto", as_ours=False), partial(load_model, dtype="auto")]
)
def test_weights_missing_from_a_folder(lost, load, tmp_path):
    make_source().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    del weights[lost]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"lacks 1 of the model's weights: '{lost}'"):
        load(str(tmp_path))


def test_a_file_that_was_cut_off(tmp_path):
    make_source().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ValueError, match=r"Cannot read the model .* \("):
        adapt(tmp_path)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("nowhere/at/all", "There is no model at 'nowhere/at/all'.*a name on the Hub"),
        ("./nothing", "There is no model at"),
        ("empty", "has no config.json; give the folder of a full model"),
        ("adapted", r"'adapted' holds an adapter, and a base is a full model; write one with equitape.load_adapter\("),
        ("packed", r"has no config.json; give the GGUF file, .*x.gguf"),
        ("notes.txt", "is not a GGUF file"),
        ("configured", "Cannot read the model"),
    ],
)
def test_paths_without_a_model(given, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "adapted", "packed", "configured"):
        (tmp_path / name).mkdir()
    (tmp_path / "adapted" / "adapter.json").touch()
    (tmp_path / "packed" / "x.gguf").touch()
    (tmp_path / "notes.txt").write_text("notes")
    make_source().config.save_pretrained("configured")
    with pytest.raises(ValueError, match=message):
        adapt(given)


def test_dtypes():
    with pytest.raises(ValueError, match=r"in torch.float32, but dtype is bfloat16; use model.to"):
        adapt(make_source(), dtype="bfloat16")
    with pytest.raises(ValueError, match=r"Unknown dtype 'int8'\. Allowed: auto"):
        adapt("anywhere", dtype="int8")


def test_gguf_needs_its_package(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=r'needs the package gguf; install it with pip install "equitape\[gguf\]"'):
        adapt(tmp_path / "x.gguf")


def test_unreadable_gguf(tmp_path):
    pytest.importorskip("gguf")
    (tmp_path / "x.gguf").write_bytes(b"not what it says" * 10)
    with pytest.raises(ValueError, match=r"Cannot read the model .*x.gguf"):
        adapt(tmp_path / "x.gguf")


def test_attention_implementation_comes_along():
    source = make_source()
    source.set_attn_implementation("eager")
    assert adapt(source).config._attn_implementation == "eager"


def test_reloads_with_auto_classes(tmp_path):
    model = adapt(make_source("qwen2"), "tape")
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is EquitapeForCausalLM
    assert torch.equal(logits(again), logits(model))
