"""What each method changes and trains."""

import io

import pytest
import torch
from rich.console import Console

from cases import build, draw_tokens, gap, tiny_config
from equitape import adapt
from equitape.adapt import METHODS, AdaptSettings, merge_lora, summarize_training
from equitape.adapt.show import show_model
from equitape.pretrained.longlora import ShiftedSparseAttention
from equitape.pretrained.lora import merged_state
from equitape.pretrained.methods import change_config, trained_parameters
from families import make_source

TOKENS = draw_tokens(2, 20)


def trained(model):
    return {name for name, _ in trained_parameters(model)}


def is_norm(name):
    return "norm" in name


EXPECTED = {
    "tape": lambda name: "encoding" in name,
    "lora": lambda name: "lora_" in name,
    "tape+lora": lambda name: "encoding" in name or "lora_" in name,
    "longlora": lambda name: "lora_" in name or "norm" in name or "embed_tokens" in name,
    "theta": lambda name: True,
    "theta+lora": lambda name: "lora_" in name,
    "theta+tape+lora": lambda name: "encoding" in name or "lora_" in name,
    "tape2+lora": lambda name: "encoding" in name or "lora_" in name,
    "theta+tape2+lora": lambda name: "encoding" in name or "lora_" in name,
    "drope": lambda name: True,
    "full": lambda name: True,
}


@pytest.mark.parametrize("method", METHODS)
def test_only_what_the_method_names_trains(method):
    """By the gradients of a step and by what the step changed, not by flags alone."""
    model = adapt(make_source("qwen3"), method, context=128).train()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1.0)
    for _ in range(2):
        # LoRA's A and TAPE's gate take no gradient before B and the zero-started weights have moved
        model(TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
    moved = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    expected = {name for name in before if EXPECTED[method](name)}
    assert expected
    assert moved == expected == trained(model)
    assert {name for name, parameter in model.named_parameters() if parameter.grad is not None} == expected


@pytest.mark.parametrize("method", ["tape", "lora", "tape+lora"])
def test_embeddings_and_norms_on_request(method):
    base = trained(adapt(make_source("qwen3"), method))
    norms = trained(adapt(make_source("qwen3"), method, train_norms=True)) - base
    assert len(norms) == 3 * 4 + 1
    assert all("norm" in name for name in norms)
    embeddings = trained(adapt(make_source("qwen3"), method, train_embeddings=True)) - base
    assert embeddings == {"model.embed_tokens.weight"}
    neither = trained(adapt(make_source("qwen3"), "longlora", train_norms=False, train_embeddings=False))
    assert all("lora_" in name for name in neither)


def test_what_trains_is_counted():
    model = adapt(make_source(), "lora", lora_rank=4, lora_targets=["q_proj", "down_proj"])
    found = summarize_training(model)
    expected = 3 * (4 * (32 + 32) + 4 * (48 + 32))
    assert (found.tensors, found.parameters) == (3 * 4, expected)
    plain = sum(parameter.numel() for parameter in make_source().parameters())
    assert found.total == plain + expected
    assert str(found) == (
        f"12 tensors, {expected:,} of {plain + expected:,} parameters, {expected / (plain + expected):.3%} of the model"
    )
    tied = summarize_training(adapt(make_source(tie_word_embeddings=True), "full"))
    assert tied.parameters == tied.total == plain - 41 * 32


def test_lora_options():
    model = adapt(make_source(), "lora", lora_rank=4, lora_alpha=12, lora_dropout=0.25, lora_targets=["v_proj"])
    layer = model.model.layers[0].self_attn.v_proj
    assert layer.lora_A["default"].weight.shape == (4, 32)
    assert layer.scaling["default"] == 3.0
    assert layer.lora_dropout["default"].p == 0.25
    assert type(model.model.layers[0].self_attn.q_proj) is torch.nn.Linear


def test_merged_weights_are_rounded_once():
    """Half-precision weights with LoRA in float32, of values whose sums are exact there."""
    model = adapt(make_source(dtype=torch.bfloat16), "lora", lora_rank=4, lora_alpha=8, lora_targets=["v_proj"])
    layer = model.model.layers[0].self_attn.v_proj
    generator = torch.Generator().manual_seed(0)
    for part in (layer.lora_A, layer.lora_B):
        weight = part["default"].weight
        weight.data = torch.randint(-64, 65, weight.shape, generator=generator) / 256
    plain = layer.base_layer.weight.detach().clone()
    product = layer.lora_B["default"].weight.double() @ layer.lora_A["default"].weight.double()
    expected = (plain.double() + 2 * product).bfloat16()
    # adding what was rounded already is another thing
    assert not torch.equal(plain + (2 * product).bfloat16(), expected)
    assert torch.equal(merged_state(model)["model.layers.0.self_attn.v_proj.weight"], expected)
    merge_lora(model)
    assert torch.equal(model.model.layers[0].self_attn.v_proj.weight, expected)


def test_tape_options_and_context():
    model = adapt(make_source(), "tape", context=256, tape={"mixer_size": 3, "layers": "last_half", "normalize": True})
    encoding = model.config.encoding
    assert (encoding["kind"], encoding["mixer_size"], encoding["layers"]) == ("tape", 3, "last_half")
    assert model.config.max_position_embeddings == 256
    # nothing forgets what it was trained for
    assert adapt(make_source(), "tape", context=32).config.max_position_embeddings == 64


def test_a_model_trained_on_shorter_rows_than_it_has_room_for():
    """What counts is what it was trained on: the factor of interpolation, the groups, and what it is meant for."""
    source = build("rope", max_position_embeddings=512, trained_length=64)
    assert adapt(source, "tape").config.context == 64
    model = adapt(source, "longlora", context=256, scaling="linear")
    longer = model.config
    assert longer.encoding["scaling"]["factor"] == 4.0
    assert (longer.context, longer.max_position_embeddings) == (256, 512)
    assert model.model.training_attention == ShiftedSparseAttention(64)
    assert adapt(source, "tape", context=1024).config.context == 1024


def test_theta():
    source = make_source(rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    assert adapt(source, "theta").config.encoding["theta"] == 1e6
    assert adapt(source, "theta+lora", theta=3e5).config.encoding["theta"] == 3e5
    changed = adapt(source, "tape", theta=5e4)
    expected = make_source(rope_parameters={"rope_type": "default", "rope_theta": 5e4})
    with torch.no_grad():
        assert gap(changed(TOKENS).logits, expected(TOKENS).logits) < 1e-5
        assert gap(changed(TOKENS).logits, source(TOKENS).logits) > 1e-4


@pytest.mark.parametrize("method", [name for name, each in METHODS.items() if not each.drops_positions])
@pytest.mark.parametrize("scaling", ["linear", "yarn"])
def test_interpolation_with_any_method(method, scaling):
    """The same logits as the original scaled by transformers' own configuration."""
    theta = 1e6 if method.startswith("theta") else 1e4
    model = adapt(make_source(), method, context=256, scaling=scaling)
    assert model.config.max_position_embeddings == 256
    parameters = {"rope_type": scaling, "factor": 4.0, "rope_theta": theta}
    if scaling == "yarn":
        parameters["original_max_position_embeddings"] = 64
    expected = make_source(rope_parameters=parameters, max_position_embeddings=256)
    tokens = draw_tokens(1, 100)
    with torch.no_grad():
        assert gap(model(tokens).logits, expected(tokens).logits) < 1e-5
        assert gap(make_source()(tokens).logits, expected(tokens).logits) > 1e-3


def test_drope_is_the_source_without_rotation():
    """Llama whose cosines are one and sines are zero, at any length."""
    source = make_source()
    model = adapt(source, "drope", context=256)
    assert model.config.context == 256
    tokens = draw_tokens(2, 100)
    with torch.no_grad():
        plain = source(tokens).logits
        turn = source.model.rotary_emb.forward
        source.model.rotary_emb.forward = lambda *given, **ids: tuple(
            map(torch.full_like, turn(*given, **ids), (1.0, 0.0))
        )
        assert gap(model(tokens).logits, source(tokens).logits) < 1e-5
        assert gap(model(tokens).logits, plain) > 1e-3
    with pytest.raises(ValueError, match="Method 'drope' does not use theta; drop it"):
        adapt(source, "drope", theta=1e6)


def test_scaling_on_top_of_scaling():
    linear = make_source(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4})
    assert adapt(linear, "lora", context=128, scaling="linear").config.encoding["scaling"]["factor"] == 4.0
    given = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e4}
    yarn = make_source(rope_parameters=given)
    assert adapt(yarn, "lora", context=128, scaling="yarn").config.encoding["scaling"]["factor"] == 8.0
    with pytest.raises(
        ValueError, match="already scales its positions by 'yarn', which cannot be combined with 'linear'"
    ):
        adapt(yarn, "lora", context=128, scaling="linear")


def test_yarn_stretched_further_has_the_temperature_of_its_new_factor():
    """One that the source was given belongs to its old factor."""
    given = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e4}
    source = make_source(rope_parameters={**given, "attention_factor": 1.3})
    assert adapt(source, "lora").config.encoding["scaling"]["attention_factor"] == 1.3
    model = adapt(source, "lora", context=128, scaling="yarn")
    assert model.config.encoding["scaling"]["attention_factor"] is None
    expected = make_source(rope_parameters={**given, "factor": 8.0}, max_position_embeddings=128)
    tokens = draw_tokens(1, 100)
    with torch.no_grad():
        assert gap(model(tokens).logits, expected(tokens).logits) < 1e-5


def test_longlora_trains_in_groups_and_answers_in_full():
    source = make_source()
    model = adapt(source, "longlora", context=80)
    assert model.model.training_attention == ShiftedSparseAttention(20)
    for scaling in (None, "linear"):
        console = Console(file=io.StringIO(), width=400)
        show_model(adapt(source, "longlora", context=80, scaling=scaling), console)
        assert ("are not trained" in console.file.getvalue()) == (scaling is None)
    assert adapt(source, "longlora").model.training_attention == ShiftedSparseAttention(16)
    assert adapt(source, "longlora", group_size=6).model.training_attention == ShiftedSparseAttention(6)
    tokens = draw_tokens(1, 60)
    with torch.no_grad():
        assert gap(model(tokens).logits, source(tokens).logits) < 1e-5
        training = model.train()(tokens).logits
    assert gap(training, source(tokens).logits) > 1e-3
    # the first tokens are in the first group of both halves
    assert gap(training[:, :10], source(tokens).logits[:, :10]) < 1e-5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "tpae"}, r"method is 'tpae'; it must be one of .* Did you mean 'tape'\?"),
        ({"scaling": "yran", "context": 99}, r"scaling is 'yran'; it must be one of .* Did you mean 'yarn'\?"),
        ({"contxt": 3}, r"adapt has no option 'contxt'. Did you mean 'context'\?"),
        ({"context": 0}, "context is 0; it must be a whole number of 1 or more"),
        ({"context": 1.5}, "context is 1.5; it must be a whole number"),
        ({"scaling": "linear"}, "context is None; set it above 64"),
        ({"scaling": "linear", "context": 64}, "context is 64; set it above 64"),
        ({"method": "lora", "lora_rank": 0}, "lora_rank is 0; it must be a whole number from 1 to 65,536"),
        ({"method": "lora", "lora_dropout": 1.0}, "lora_dropout is 1.0"),
        ({"method": "lora", "lora_targets": ["q_porj"]}, r"lora_targets is .* Did you mean 'q_proj'\?"),
        ({"method": "lora", "lora_targets": []}, "lora_targets is empty; give one or more of q_proj"),
        ({"method": "tape", "lora_rank": 4}, "'tape' does not use lora_rank; drop it"),
        ({"method": "lora", "tape": {"mixer_size": 3}}, "'lora' does not use tape"),
        ({"method": "lora", "group_size": 3}, "'lora' does not use group_size"),
        ({"method": "full", "train_norms": False}, "'full' does not use train_norms"),
        ({"tape": {"mixer": 3}}, r"Encoding 'tape' has no option 'mixer'. Did you mean 'mixer_size'\?"),
        ({"theta": 0.5}, "theta is 0.5; it must be a number above 1"),
    ],
)
def test_refused_settings(options, message):
    with pytest.raises(ValueError, match=message):
        adapt(make_source(), **options)


def test_a_model_without_anything_to_train():
    with pytest.raises(ValueError, match="No block of this model can update TAPE's field"):
        adapt(make_source(num_hidden_layers=1), "tape")


@pytest.mark.parametrize("method", ["tape", "tape2+lora"])
@pytest.mark.parametrize("decay", ["none", "slopes", "learned", "gate"])
def test_parts_of_a_rotary_source_stay(method, decay):
    """Its decay too, which the new weights of TAPE lie next to; and the source itself does not change."""
    source, tokens = build("rope", {"decay": decay, "decay_heads": 0.5, "rotate_values": 0.5}), draw_tokens(2, 9)
    before = source(tokens).logits
    adapted = adapt(source, method)
    assert gap(adapted(tokens).logits, before) < 1e-6
    assert gap(source(tokens).logits, before) == 0
    assert adapted.config.encoding["decay"] == decay


def test_more_updating_blocks_keep_the_weights_of_others():
    source, tokens = build("tape2", {"layers": [1]}), draw_tokens(2, 9)
    before = source(tokens).logits
    adapted = adapt(source, "tape2+lora", tape={"layers": "all"})
    assert len([name for name, _ in adapted.named_parameters() if name.endswith("carry")]) == 2
    assert gap(adapted(tokens).logits, before) < 1e-6
    assert gap(source(tokens).logits, before) == 0


def test_settings_are_refused_before_weights_are_read(tmp_path):
    """A folder without weights is enough for this error."""
    make_source().config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="set it above 64"):
        adapt(tmp_path, "tape", scaling="yarn", context=10)


def test_settings_survive_json():
    settings = AdaptSettings(method="longlora", context=99, lora_targets=("q_proj",), train_norms=False)
    assert AdaptSettings.parse(settings.to_dict(), "test") == settings


@pytest.mark.parametrize("method", ["tape", "drope"])
def test_values_of_another_width_are_refused_before_weights_are_read(method):
    source = tiny_config("tape2-carried") if method == "drope" else tiny_config("rope")
    given = {"tape": {"carried_frequencies": 2}} if method == "tape" else {}
    with pytest.raises(ValueError, match="carried_frequencies of TAPE make values narrower"):
        change_config(source, AdaptSettings(method=method, **given))
