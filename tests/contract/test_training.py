"""Gradient checkpointing, compilation, grouped heads and half precision leave the function as it is."""

import pytest
import torch
from cases import CASES, build, draw_tokens, gap

from equitape import EquitapeForCausalLM

DETERMINISTIC = [case for case in CASES if "sampled" not in case]


def loss_and_gradients(model, tokens):
    model.train()
    model.zero_grad()
    torch.manual_seed(3)
    loss = model(tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_gradients_are_bit_identical(case, reentrant):
    model = build(case, dtype=torch.float32)
    tokens = draw_tokens(2, 10)
    loss, expected = loss_and_gradients(model, tokens)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    other, found = loss_and_gradients(model, tokens)
    assert torch.equal(loss, other)
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


@pytest.mark.parametrize("case", CASES)
def test_every_parameter_gets_a_gradient(case):
    _, grads = loss_and_gradients(build(case), draw_tokens(2, 12))
    assert all(grad is not None and grad.abs().max() > 0 for name, grad in grads.items())


@pytest.mark.parametrize("case", DETERMINISTIC)
def test_compiled_fullgraph_equals_eager(case):
    torch._dynamo.reset()
    model = build(case)
    tokens = draw_tokens(2, 10)
    mask = torch.ones_like(tokens)
    mask[1, :3] = 0
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for inputs in ({}, {"attention_mask": mask}):
        expected = model(tokens, use_cache=False, **inputs).logits
        assert gap(compiled(tokens, use_cache=False, **inputs).logits, expected) < 1e-10
    model.train()
    compiled(tokens, labels=tokens, use_cache=False).loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    _, expected = loss_and_gradients(model, tokens)
    if "randpe" not in case:
        assert all(gap(found[name], expected[name]) < 1e-10 for name in expected)


@pytest.mark.parametrize("case", ["tape", "tape-options"])
def test_compiled_by_inductor_equals_eager(case):
    torch._dynamo.reset()
    model = build(case, dtype=torch.float32)
    tokens = draw_tokens(2, 10)
    expected = model(tokens, use_cache=False).logits
    found = torch.compile(model, fullgraph=True)(tokens, use_cache=False).logits
    assert gap(found, expected) < 1e-4


def expand_heads(model):
    """The same function with a key-value head for every query head."""
    config = model.config
    ratio = config.num_attention_heads // config.num_key_value_heads
    options = dict(config.encoding)
    if options["kind"] in ("tape", "tensor_tape"):
        options.setdefault("mixer_size", 4 * config.num_key_value_heads)
    wide = EquitapeForCausalLM(
        type(config)(**{**config.to_dict(), "num_key_value_heads": config.num_attention_heads, "encoding": options})
    ).to(model.dtype)
    weights = model.state_dict()
    for name in list(weights):
        weight = weights[name]
        if "k_proj" in name or "v_proj" in name:
            heads = weight.unflatten(0, (config.num_key_value_heads, -1))
            weights[name] = heads.repeat_interleave(ratio, dim=0).flatten(0, 1)
        elif name.endswith(("encoding.carry", "encoding.mix_out")):
            weights[name] = weight.repeat_interleave(ratio, dim=-2)
        elif name.endswith("encoding.mix_in"):
            # each field now stands `ratio` times in the sum
            weights[name] = weight.repeat_interleave(ratio, dim=-1) / ratio
    wide.load_state_dict(weights)
    return wide.eval()


@pytest.mark.parametrize("case", [case for case in DETERMINISTIC if case not in (
    "tape-fourier", "tensor_tape-components", "tensor_tape-channels", "tensor_tape-maximal")])  # fmt: skip
def test_grouped_heads_equal_expanded_heads(case):
    model = build(case)
    tokens = draw_tokens(2, 10)
    assert gap(model(tokens).logits, expand_heads(model)(tokens).logits) < 1e-10


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", DETERMINISTIC)
def test_half_precision_error(case, dtype):
    """Against float64, at most twice the error that the same decoder makes without any encoding."""
    tokens = draw_tokens(4, 24)

    def error(name):
        exact = build(name)
        half = build(name, dtype=dtype)
        with torch.no_grad():
            # the weights are rounded in both, so that only the arithmetic differs
            exact.load_state_dict({key: value.double() for key, value in half.state_dict().items()})
            reference = exact(tokens).logits
            return ((half(tokens).logits.double() - reference).norm() / reference.norm()).item()

    assert error(case) <= 2 * error("nope")
