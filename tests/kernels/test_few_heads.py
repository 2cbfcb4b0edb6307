"""The backward of the field update for few heads, where no matrix unit is used, and where it is taken."""

import pytest
import torch
from devices import DEVICES, INTERPRETED, needs_triton, on_cuda
from fields import NAMES, cast, check, make_inputs

from equitape.kernels import reference
from equitape.kernels.operator import fused_gradients

pytestmark = needs_triton
OF_TOKENS = NAMES[:3]


def named(sizes):
    return "-".join(f"{name}{size}" for name, size in sizes.items())


@pytest.fixture(autouse=True)
def launched(monkeypatch):
    """Names of the kernels that backward launched; every test here sees that it was the right one."""
    from equitape.kernels import triton_backward

    names = []

    def recorded(kernel, *arguments):
        names.append(kernel.__name__)
        return launch(kernel, *arguments)

    launch = triton_backward.launch
    monkeypatch.setattr(triton_backward, "launch", recorded)
    if INTERPRETED:
        # most of the time; test_field.py tests it
        monkeypatch.setattr("equitape.kernels.triton_forward.forward", plain_forward)
    return names


def plain_forward(updated, *inputs):
    updated.copy_(reference.update_field(*inputs))


def check_few(launched, inputs, device, dtype, frozen=()):
    check(inputs, device, dtype, frozen=frozen)
    assert launched == ["few_heads_kernel", "sum_kernel"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "sizes",
    [
        {"groups": 1, "heads": 4, "tokens": 67, "batch": 1},
        {"groups": 2, "heads": 2, "dim": 64, "gates": 3},
        {"groups": 3, "heads": 9, "dim": 24, "tokens": 17, "batch": 1},
        {"groups": 3, "heads": 5, "dim": 100, "gates": 13, "tokens": 18},
        {"groups": 2, "heads": 16, "tokens": 3},
        {"groups": 2, "heads": 14, "dim": 256, "tokens": 9, "batch": 1},
    ],
    ids=named,
)
@pytest.mark.parametrize("device", DEVICES)
def test_twice_rule(device, sizes, dtype, launched):
    check_few(launched, make_inputs(**sizes), device, dtype)


@pytest.mark.parametrize("device", DEVICES)
def test_one_of_each(device, launched):
    # in float32: forward rounds the one number of a token to 16 bits once more than plain PyTorch, and nothing averages
    check_few(launched, make_inputs(groups=1, heads=1, tokens=1), device, torch.float32)


@pytest.mark.parametrize(
    "sizes",
    [
        {"groups": 3, "heads": 9, "dim": 64},
        {"groups": 2, "heads": 14, "dim": 64},
        {"groups": 3, "heads": 10, "dim": 128},
        {"groups": 1, "heads": 8, "dim": 256},
    ],
    ids=named,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.gpu
@on_cuda
def test_model_sizes(dtype, sizes, launched):
    check_few(launched, make_inputs(**sizes, tokens=5003), "cuda", dtype)


@pytest.mark.parametrize("frozen", [(), ("field",)])
@pytest.mark.parametrize("steps", [{"carry": False}, {"mix": False}, {}], ids=["mix", "carry", "both"])
@pytest.mark.parametrize("device", DEVICES)
def test_steps_and_wanted_gradients(device, steps, frozen, launched):
    check_few(launched, make_inputs(**steps, groups=3, heads=5, tokens=19), device, torch.float32, frozen)


@pytest.mark.parametrize("width", [8, 16])
@pytest.mark.parametrize("device", DEVICES)
def test_all_that_is_tuned(device, width, launched, monkeypatch):
    """Channels of a thread and a chunk, warps, and rows under way change nothing but rounding."""
    for name, value in {"THREAD_BYTES": width, "CHUNK": 32, "WARPS": 2, "AHEAD": 2}.items():
        monkeypatch.setattr(f"equitape.kernels.triton_few_heads.{name}", value)
    check_few(launched, make_inputs(groups=3, heads=4, dim=40, tokens=9), device, torch.bfloat16)


@pytest.mark.parametrize("device", DEVICES)
def test_a_broken_token_stays_alone(device, launched):
    """What is not a number, or infinite, in one token does not reach the gradients of another."""
    inputs = {name: cast(x, device, torch.bfloat16).detach() for name, x in make_inputs(tokens=17, dim=64).items()}
    inputs = {"grad_output": torch.randn(inputs["field"].shape).to(device, torch.bfloat16), **inputs}
    whole = fused_gradients(*inputs.values(), False, True)
    kept = [token for token in range(17) if token not in (3, 10)]
    for poisoned in ("grad_output", *OF_TOKENS):
        tensor = inputs[poisoned].clone()
        axis = 1 if poisoned == "gate" else 2
        tensor.select(axis, 3)[0] = torch.nan
        tensor.select(axis, 10)[0] = torch.inf
        broken = fused_gradients(*{**inputs, poisoned: tensor}.values(), False, True)
        seen = False
        for name, before, after in zip(OF_TOKENS, whole, broken, strict=False):
            before, after = (x if name == "gate" else x.transpose(1, 2) for x in (before, after))
            assert torch.equal(before[:, kept], after[:, kept]), (poisoned, name)
            assert torch.equal(before[1], after[1]), (poisoned, name)
            seen |= bool(after[0, 3].isnan().any())
        assert seen, poisoned
    assert launched == ["few_heads_kernel", "sum_kernel"] * 5


@pytest.mark.parametrize(
    ("change", "taken"),
    [
        ({"groups": 2, "heads": 16, "gates": 16}, "few_heads_kernel"),
        ({"groups": 4, "heads": 4, "gates": 4}, "gradient_kernel"),
        ({"groups": 3, "heads": 11}, "gradient_kernel"),
        ({"gates": 17}, "gradient_kernel"),
        ({"parts": 2}, "in_turn_gradient_kernel"),
        ({"normalize": True}, "gradient_kernel"),
    ],
    ids=lambda value: named(value) if isinstance(value, dict) else None,
)
@pytest.mark.parametrize("device", DEVICES)
def test_where_it_is_taken(device, change, taken, launched):
    normalize = change.get("normalize", False)
    sizes = {name: size for name, size in change.items() if name != "normalize"}
    inputs = [cast(x, device, torch.float32).detach() for x in make_inputs(**sizes, tokens=2).values()]
    fused_gradients(torch.ones_like(inputs[0]), *inputs, normalize, True)
    assert launched == [taken, "sum_kernel"]
