"""Gradient checkpointing, compilation, grouped heads and half precision leave the function as it is."""

from functools import cache

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
    if model.model.encoding.adds_bias:
        # sdpa has another kernel for a bias without gradient, as the first pass of reentrant checkpointing sees it
        model.set_attn_implementation("eager")
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


def logits_and_gradients(model, run, **inputs):
    """Gradients of a loss in float64: transformers' own is formed in float32."""
    model.zero_grad()
    logits = run(use_cache=False, **inputs).logits
    logits.logsumexp(-1).square().sum().backward()
    return [logits, *(p.grad.clone() for p in model.parameters())]


# the compiler sees rope in rope-yarn, whose frequencies are made before, and tensor_tape-l1r4 in -l4r1
@pytest.mark.parametrize("case", [case for case in DETERMINISTIC if case not in ("rope-yarn", "tensor_tape-l4r1")])
def test_compiled_fullgraph_equals_eager(case):
    torch._dynamo.reset()
    # the second block of those with a state sees another one; blocks of the others are alike
    layers = 2 if case.startswith(("tape", "tensor_tape")) else 1
    model, tokens = build(case, num_hidden_layers=layers), draw_tokens(2, 8)
    mask = torch.ones_like(tokens)
    mask[1, :3] = 0
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    plain, found = (
        logits_and_gradients(model, run, input_ids=tokens, attention_mask=mask) for run in (model, compiled)
    )
    assert all(gap(a, b) < 1e-10 for a, b in zip(plain, found, strict=True))


@pytest.mark.inductor
def test_a_block_compiled_by_inductor_equals_eager():
    """The first of two blocks, which has every part; a C++ compiler takes seconds for each kernel of a whole model."""
    torch._dynamo.reset()
    model, tokens = build("tape", num_hidden_layers=2), draw_tokens(2, 10)
    plain = logits_and_gradients(model, model, input_ids=tokens)
    # scalar code compiles faster
    model.model.layers[0].compile(fullgraph=True, options={"cpp.simdlen": 1})
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    found = logits_and_gradients(model, model, input_ids=tokens)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs + 1
    assert all(gap(a, b) < 1e-10 for a, b in zip(plain, found, strict=True))


PER_GROUP = ("move_gain", "encoding.clock", "encoding.taps", "encoding.strength", "encoding.strength_bias")
"""Parameters with one row per key-value head."""


def expand_heads(model):
    """The same function with a key-value head for every query head."""
    config = model.config
    ratio = config.num_attention_heads // config.num_key_value_heads
    options = dict(config.encoding)
    if options["kind"] in ("tape", "tape2", "tensor_tape"):
        options.setdefault("mixer_size", 4 * config.num_key_value_heads)
    wide = EquitapeForCausalLM(
        type(config)(**{**config.to_dict(), "num_key_value_heads": config.num_attention_heads, "encoding": options})
    ).to(model.dtype)
    weights = model.state_dict()
    for name in list(weights):
        weight = weights[name]
        if "k_proj" in name or "v_proj" in name or name.endswith("encoding.up.weight"):
            heads = weight.unflatten(0, (config.num_key_value_heads, -1))
            weights[name] = heads.repeat_interleave(ratio, dim=0).flatten(0, 1)
        elif name.endswith(PER_GROUP) or (options.get("decay") == "gate" and ".decay." in name):
            weights[name] = weight.repeat_interleave(ratio, dim=0)
        elif name.endswith(("encoding.carry", "encoding.mix_out", "move_heads")):
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


@cache
def half_precision_error(case, dtype, implementation="sdpa", offset=0):
    """Relative error of a half-precision model against float64 with the same, rounded weights."""
    tokens = draw_tokens(4, 24)
    ids = torch.arange(24)[None] + offset
    exact, half = build(case), build(case, dtype=dtype)
    half.set_attn_implementation(implementation)
    exact.load_state_dict({key: value.double() for key, value in half.state_dict().items()})
    with torch.no_grad():
        expected = exact(tokens, position_ids=ids).logits
        return ((half(tokens, position_ids=ids).logits.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", DETERMINISTIC)
def test_half_precision_error_is_at_most_twice_that_of_plain_pytorch(case, dtype):
    assert half_precision_error(case, dtype) <= 2 * half_precision_error(case, dtype, "eager")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", DETERMINISTIC)
def test_half_precision_error_does_not_grow_with_the_ids(case, dtype):
    """Ids, angles and distances are never formed in half precision, where 2049 is already inexact."""
    offset = 40 if case == "learned" else 30_001
    assert half_precision_error(case, dtype, offset=offset) <= 2 * half_precision_error(case, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_error_of_phasors_is_at_most_twice_that_of_tensors(dtype):
    assert half_precision_error("tape", dtype) <= 2 * half_precision_error("tensor_tape", dtype)
