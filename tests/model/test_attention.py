"""Which attention kernel serves a call."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from cases import CASES, build, draw_tokens, gap
from equitape.nn import backends, core


def operators(run):
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        run()
    return {event.key for event in trace.key_averages() if "scaled_dot_product" in event.key}


@pytest.mark.parametrize("case", ["rope", "tape", "tensor_tape"])
@pytest.mark.parametrize("train", [False, True])
def test_the_fused_kernel_of_the_cpu_takes_a_widened_value(case, train):
    model = build(case, dtype=torch.float32, attn_implementation="sdpa")
    tokens = draw_tokens(2, 24)

    def run():
        with torch.set_grad_enabled(train):
            loss = model(tokens, labels=tokens, use_cache=False).loss
        if train:
            loss.backward()

    used = operators(run)
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in used
    assert "aten::_scaled_dot_product_attention_math" not in used


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_dropped_weights_are_the_same_for_token_and_field(implementation):
    """A value of ones shows the sum of the weights that were left: both halves of the widened value must agree."""
    model = build("tape", attn_implementation=implementation, attention_dropout=0.5).train()
    attention = model.model.layers[0].self_attn
    sums, fields = [], []
    with torch.no_grad():
        attention.v_proj.register_forward_hook(lambda module, inputs, output: torch.ones_like(output))
        attention.encoding.extra_values = lambda state: torch.ones_like(state)
        attention.o_proj.register_forward_pre_hook(lambda module, inputs: sums.append(inputs[0]))
        attention.encoding.update = lambda state, attended_state, normed_hidden, mlp_output: (
            fields.append(attended_state) or state
        )
        model(draw_tokens(2, 24), use_cache=False)
    token_sums = sums[0].unflatten(-1, (model.config.num_attention_heads, -1)).transpose(1, 2)
    assert gap(token_sums, fields[0]) < 1e-12
    assert token_sums.std() > 0.1


@pytest.mark.parametrize(
    ("side", "training", "masked"),
    [
        ("right", True, False),
        ("right", False, True),
        ("left", True, True),
        ("none", True, False),
        ("none", False, False),
    ],
)
def test_padding_behind_the_tokens_needs_no_dense_mask(side, training, masked, monkeypatch):
    """The commonest batches of all keep the fast path in training, where nothing reads the logits of padding."""
    model = build("tape", attn_implementation="sdpa").train(training)
    tokens = draw_tokens(2, 12)
    mask = torch.ones_like(tokens)
    if side != "none":
        mask[1, slice(8, None) if side == "right" else slice(None, 4)] = 0
    seen = []
    monkeypatch.setattr(core, "attend", lambda *args, real=core.attend: seen.append(args[6].mask) or real(*args))
    model(tokens, attention_mask=mask, use_cache=False)
    assert len(seen) == model.config.num_hidden_layers
    assert all((mask is not None) == masked for mask in seen)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_fused_kernels_could_take_what_attention_gets(case, autocast, monkeypatch):
    """Query, key and value of one dtype, and a bias whose keys lie side by side: what no fused kernel does without."""
    model = build(case, dtype=torch.float32, attn_implementation="sdpa")
    calls = []

    def attend(query, key, value, attn_mask=None, *args, real=torch.nn.functional.scaled_dot_product_attention, **rest):
        calls.append((query, key, value, attn_mask))
        return real(query, key, value, attn_mask, *args, **rest)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        model(draw_tokens(2, 24), use_cache=False)
    assert len(calls) >= model.config.num_hidden_layers
    for query, key, value, mask in calls:
        assert query.dtype == key.dtype == value.dtype == (torch.bfloat16 if autocast else torch.float32)
        assert mask is None or mask.stride(-1) == 1


@pytest.fixture
def usable(monkeypatch):
    """Say which kernels can be used, by a function of what is asked; without a GPU torch may not even be asked."""
    backends.warn_once.cache_clear()

    def say(efficient):
        monkeypatch.setattr(torch.backends.cuda, "can_use_efficient_attention", efficient)
        monkeypatch.setattr(torch.backends.cuda, "can_use_flash_attention", lambda inputs: False)
        monkeypatch.setattr(torch.backends.cuda, "can_use_cudnn_attention", lambda inputs: False)

    yield say
    backends.warn_once.cache_clear()


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_slow_kernel_is_named_under_compile_too(dynamic, usable, recwarn):
    usable(lambda inputs: False)
    torch._dynamo.reset()
    step = torch.compile(backends.cuda_attention, fullgraph=True, dynamic=dynamic, backend="eager")
    for length in (8, 12, 16):
        inputs = [torch.randn(1, heads, length, 4) for heads in (4, 2, 2)]
        assert gap(step(*inputs, None, 0.0, 0.5), backends.cuda_attention(*inputs, None, 0.0, 0.5)) < 1e-6
    messages = [str(warning.message) for warning in recwarn if "No fused attention kernel" in str(warning.message)]
    assert messages == [
        "No fused attention kernel supports torch.float32, keys 4 and values 4 wide; torch's fallback is slow and "
        "needs quadratic memory."
    ]


@pytest.mark.parametrize("side_by_side", [True, False])
def test_a_small_input_of_the_same_kind_is_asked(side_by_side, usable, monkeypatch, recwarn):
    asked = []
    monkeypatch.setattr(torch.backends.cuda, "SDPAParams", lambda *inputs: asked.append(inputs) or inputs)
    usable(lambda inputs: inputs[3].stride(-1) == 1)
    bias = torch.randn(2, 4, 9, 9, requires_grad=True)
    if not side_by_side:
        bias = bias.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    query, key, value = (torch.randn(2, heads, 9, 16, dtype=torch.bfloat16) for heads in (4, 2, 2))
    for _ in range(2):
        backends.cuda_attention(query, key, value, bias.bfloat16(), 0.0, 0.25)
    [(query, key, value, mask, _, causal, grouped)] = asked
    assert (query.shape[1], key.shape[1], value.shape[1], mask.shape[1]) == (4, 4, 4, 4)
    assert (query.dtype, mask.dtype, mask.requires_grad) == (torch.bfloat16, torch.bfloat16, True)
    assert (mask.stride(-1) == 1) == side_by_side
    assert (causal, grouped) == (False, False)
    assert side_by_side != any("and this mask" in str(warning.message) for warning in recwarn)
