"""What a forward can return besides logits, and what else transformers expects of a model."""

import pytest
import torch
from accelerate import cpu_offload

from cases import CASES, VOCAB, build, draw_tokens, gap, tiny_config
from equitape import EquitapeForCausalLM, EquitapeForSequenceClassification, EquitapeForTokenClassification

TOKENS = draw_tokens(2, 7)


@pytest.mark.parametrize("case", CASES)
def test_attentions_and_hidden_states(case):
    model = build(case)
    model.set_attn_implementation("eager")
    output = model(TOKENS, output_attentions=True, output_hidden_states=True)
    assert len(output.attentions) == 3
    for weights in output.attentions:
        assert weights.shape == (2, 4, 7, 7)
        assert gap(weights.sum(-1), torch.ones(2, 4, 7)) < 1e-9
        assert weights.triu(1).abs().max() == 0
    assert [tuple(state.shape) for state in output.hidden_states] == [(2, 7, 32)] * 4


@pytest.mark.parametrize("case", CASES)
def test_position_states(case):
    model = build(case)
    output = model(TOKENS, output_position_states=True)
    if not model.model.encoding.has_field:
        assert output.position_states is None
        return
    assert [tuple(state.shape) for state in output.position_states] == [(2, 2, 7, 8)] * 3
    if not any(part in case for part in ("sampled", "fourier")) and not getattr(
        model.model.encoding, "has_clock", False
    ):
        # the first layer turns by the plain phasors: position 0 is one
        start = output.position_states[0][:, :, 0]
        assert gap(start, torch.cat((torch.ones(2, 2, 4), torch.zeros(2, 2, 4)), -1)) < 1e-12


def test_position_states_by_configuration():
    model = build("tape", output_position_states=True)
    assert len(model(TOKENS).position_states) == 3
    assert build("tape")(TOKENS).position_states is None


def test_input_embeddings_are_those_the_model_makes_of_ids():
    """Scaled where the model scales them, also after more tokens are added: callers pass them on as inputs_embeds."""
    model = build("tape", embedding_scale=1.7)
    plain = build("tape")
    plain.model.embed_tokens.weight.data *= 1.7
    expected = plain(TOKENS).logits
    assert gap(model(TOKENS).logits, expected) < 1e-12
    assert gap(model(inputs_embeds=model.get_input_embeddings()(TOKENS)).logits, expected) < 1e-12
    model.resize_token_embeddings(VOCAB + 3)
    assert gap(model(inputs_embeds=model.get_input_embeddings()(TOKENS)).logits[..., :VOCAB], expected) < 1e-12


def test_looped_depth_injects_the_input():
    """Two loops of two blocks, written out by hand."""
    model = build("nope", num_hidden_layers=4, num_loops=2)
    once = build("nope", num_hidden_layers=2)
    once.load_state_dict(model.state_dict())
    embeddings = model.get_input_embeddings()(TOKENS)
    last = {}
    handle = once.model.layers[1].register_forward_hook(lambda *hook: last.update(x=hook[2][0]))
    once(inputs_embeds=embeddings)
    once(inputs_embeds=last["x"] + embeddings)
    handle.remove()
    assert gap(model(TOKENS).logits, once.lm_head(once.model.norm(last["x"]))) < 1e-10


def test_windows_belong_to_applications_not_to_blocks():
    """Two loops of two blocks by hand, a window in the third application: the first block, the second time alone."""
    sizes = {"num_hidden_layers": 4, "num_loops": 2, "sliding_window": 3}
    model = build("nope", sliding_layers=[2], **sizes)
    wide = build("nope", num_hidden_layers=2)
    narrow = build("nope", num_hidden_layers=2, sliding_window=3, sliding_layers=[0])
    last = {}
    for once in (wide, narrow):
        once.load_state_dict(model.state_dict())
        once.model.layers[1].register_forward_hook(lambda *hook: last.update(x=hook[2][0]))
    embeddings = model.get_input_embeddings()(TOKENS)
    wide(inputs_embeds=embeddings)
    narrow(inputs_embeds=last["x"] + embeddings)
    found = model(TOKENS).logits
    assert gap(found, model.lm_head(model.model.norm(last["x"]))) < 1e-10
    assert gap(found, build("nope", sliding_layers=[0], **sizes)(TOKENS).logits) > 1e-3


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("case", ["tape", "alibi"])
@pytest.mark.parametrize("sliding_layers", [[0], [1, 2]])
def test_each_type_of_layer_takes_its_own_prepared_mask(case, sliding_layers, implementation):
    """As generate prepares them for a static cache, by hand: the same logits as with the masks a forward makes."""
    model = build(case, sliding_window=3, sliding_layers=sliding_layers, attn_implementation=implementation)
    full = torch.zeros(2, 1, 7, 7, dtype=torch.bool)
    sliding = full.clone()
    for i in range(7):
        full[:, :, i, : i + 1] = True
        sliding[:, :, i, max(i - 2, 0) : i + 1] = True
    masks = {"full_attention": full, "sliding_attention": sliding}
    if implementation == "eager":
        # transformers gives this one numbers to add
        masks = {name: torch.zeros(2, 1, 7, 7).double().masked_fill(~mask, -1e300) for name, mask in masks.items()}
    expected = model(TOKENS).logits
    assert gap(model(TOKENS, attention_mask=masks).logits, expected) < 1e-10
    for mask in masks.values():
        assert gap(model(TOKENS, attention_mask=mask).logits, expected) > 1e-3


def test_logits_to_keep():
    model = build("tape")
    every = model(TOKENS).logits
    assert gap(model(TOKENS, logits_to_keep=2).logits, every[:, -2:]) < 1e-12
    assert gap(model(TOKENS, logits_to_keep=torch.tensor([1, 4])).logits, every[:, [1, 4]]) < 1e-12


def test_loss_is_cross_entropy_of_the_next_token():
    model = build("tape", dtype=torch.float32)
    output = model(TOKENS, labels=TOKENS)
    expected = torch.nn.functional.cross_entropy(output.logits[:, :-1].reshape(-1, VOCAB), TOKENS[:, 1:].reshape(-1))
    torch.testing.assert_close(output.loss, expected)


def test_classifiers():
    config = tiny_config("tape", num_labels=3)
    assert EquitapeForSequenceClassification(config)(TOKENS).logits.shape == (2, 3)
    assert EquitapeForTokenClassification(config)(TOKENS).logits.shape == (2, 7, 3)


def test_resizing_embeddings():
    model = build("tape", dtype=torch.float32)
    before = model(TOKENS).logits
    model.resize_token_embeddings(VOCAB + 5)
    after = model(TOKENS).logits
    assert after.shape[-1] == VOCAB + 5
    assert gap(after[..., :VOCAB], before) < 1e-6


def test_meta_device_then_weights(tmp_path):
    model = build("tape", dtype=torch.float32)
    with torch.device("meta"):
        empty = EquitapeForCausalLM(model.config)
    assert all(p.is_meta for p in empty.parameters())
    assert not list(empty.buffers())
    empty.load_state_dict(model.state_dict(), assign=True)
    assert torch.equal(empty.eval()(TOKENS).logits, model(TOKENS).logits)
    model.save_pretrained(tmp_path)
    placed = EquitapeForCausalLM.from_pretrained(tmp_path, device_map={"": "cpu"})
    assert torch.equal(placed(TOKENS).logits, model(TOKENS).logits)


@pytest.mark.parametrize(
    ("case", "implementation"),
    [*((case, "sdpa") for case in CASES), *((case, "flex_attention") for case in ("t5", "fire"))],
)
def test_offloaded_weights_are_loaded_by_the_modules_that_hold_them(case, implementation):
    """Every module has its own weights only while its forward runs."""
    model = build(case, attn_implementation=implementation)
    torch.manual_seed(0)
    # FlexAttention on the CPU computes no gradients
    with torch.set_grad_enabled(implementation == "sdpa"):
        expected = model(TOKENS, use_cache=False).logits
        cpu_offload(model, execution_device=torch.device("cpu"))
        assert all(parameter.is_meta for parameter in model.parameters())
        torch.manual_seed(0)
        assert gap(model(TOKENS, use_cache=False).logits, expected) < 1e-9


def test_device_map_over_disk(tmp_path):
    """Layers offloaded to disk: accelerate's hooks move tokens, state and positions with the layers."""
    model = build("tape", dtype=torch.float32)
    model.save_pretrained(tmp_path / "model")
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.layers.2": "cpu",
              "model.norm": "cpu", "lm_head": "cpu", "model.encoding": "cpu"}  # fmt: skip
    spread = EquitapeForCausalLM.from_pretrained(
        tmp_path / "model", device_map=places, offload_folder=tmp_path / "offload"
    )
    assert gap(spread(TOKENS).logits, model(TOKENS).logits) < 1e-6


@pytest.mark.parametrize("case", ["tape", "tape2", "fire", "rope"])
def test_autocast(case):
    """Autocast rounds products alone, so it errs less than a model that is bfloat16 throughout, in every gradient too.

    An error is a norm, relative to that in float64, in units of one rounding to bfloat16 (2^-9).
    """

    def run(model, tokens, enabled=False):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            output = model(tokens, labels=tokens)
        output.loss.backward()
        gradients = torch.cat([parameter.grad.double().flatten() for parameter in model.parameters()])
        return output.logits.detach().double().flatten(), gradients

    found = []
    for seed in range(4):
        tokens = draw_tokens(2, 24, seed=seed)
        exact = run(build(case, dtype=torch.float32).double(), tokens)
        rounded = run(build(case, dtype=torch.float32).bfloat16(), tokens)
        mixed = run(build(case, dtype=torch.float32), tokens, enabled=True)
        found.append([[(one - true).norm() / true.norm() * 2**9 for one, true in zip(pair, exact, strict=True)]
                      for pair in (mixed, rounded)])  # fmt: skip
    mixed, rounded = torch.tensor(found).mean(0)
    assert (mixed < rounded).all(), (mixed, rounded)
    # three layers of some ten roundings each; gradients pass them twice
    assert mixed[0] < 15
    assert mixed[1] < 35
