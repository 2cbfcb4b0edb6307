"""The fused field update against the plain one: outputs and all gradients, by the twice-rule against float64."""

import pytest
import torch
from devices import DEVICES, needs_triton, on_cuda, on_interpreter
from fields import NAMES, cast, check, make_inputs, run

from equitape.kernels import reference, update_field
from equitape.kernels.operator import fused_gradients, fused_update

pytestmark = needs_triton


@pytest.fixture(params=["real", "complex, by matrices", "complex, in turn"])
def parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Real and imaginary parts of weights. Complex ones are applied in turn if there are few frequencies."""
    if request.param == "complex, by matrices":
        monkeypatch.setattr("equitape.kernels.FEW_FREQUENCIES", 0)
    return 1 if request.param == "real" else 2


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("device", DEVICES)
def test_twice_rule(device, dtype, parts, normalize):
    check(make_inputs(groups=3, heads=6, tokens=5, dim=24, parts=parts), device, dtype, normalize)


@pytest.mark.parametrize(
    "sizes",
    [
        {"groups": 1, "heads": 1, "tokens": 1},
        {"groups": 1, "heads": 4, "tokens": 17, "batch": 1},
        {"groups": 2, "heads": 2, "dim": 64, "gates": 3},
        {"groups": 5, "heads": 15, "dim": 40, "gates": 21, "tokens": 3},
        {"groups": 13, "heads": 26, "tokens": 5, "batch": 1, "dim": 16, "gates": 20},
        {"groups": 2, "heads": 32, "tokens": 2, "dim": 128},
    ],
    ids=lambda sizes: "-".join(f"{name}{size}" for name, size in sizes.items()),
)
@pytest.mark.parametrize("device", DEVICES)
def test_sizes(device, sizes, parts):
    # one real number per token only scales its field, which normalisation undoes: gradients would be rounding errors
    check(make_inputs(**sizes, parts=parts), device, torch.float32, normalize=sizes["groups"] > 1)


@pytest.mark.parametrize(
    "sizes",
    [
        {"groups": 12, "heads": 12, "dim": 64},
        {"groups": 12, "heads": 12, "dim": 16},
        {"groups": 3, "heads": 9, "dim": 64},
        {"groups": 16, "heads": 16, "dim": 128},
        {"groups": 8, "heads": 32, "dim": 80},
        {"groups": 16, "heads": 32, "dim": 256},
    ],
    ids=lambda sizes: "-".join(f"{name}{size}" for name, size in sizes.items()),
)
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.gpu
@on_cuda
def test_model_sizes(dtype, normalize, parts, sizes):
    check(make_inputs(**sizes, tokens=515, parts=parts), "cuda", dtype, normalize)


@pytest.mark.parametrize("only", ["carry", "mix"])
@pytest.mark.parametrize("device", DEVICES)
def test_one_of_the_two_steps(device, parts, only):
    inputs = make_inputs(parts=parts, carry=only == "carry", mix=only == "mix")
    check(inputs, device, torch.float32)
    check(inputs, device, torch.bfloat16, normalize=True)


@pytest.mark.parametrize("device", DEVICES)
def test_field_shared_by_the_batch(device):
    inputs = make_inputs(batch=3)
    inputs["field"] = inputs["field"][:1].clone()
    check(inputs, device, torch.float32)


@pytest.mark.parametrize("device", DEVICES)
def test_expanded_and_strided(device):
    """Fields of stride zero over batch or heads, and fields, gates and grad_outputs whose axes lie in any order."""
    inputs = {name: cast(x, device, torch.float32).detach() for name, x in make_inputs(groups=3, heads=3).items()}
    expanded = dict(inputs, field=inputs["field"][:1, :1].expand(2, 3, -1, -1))
    odd = dict(
        inputs,
        field=inputs["field"].permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
        attended=inputs["attended"].repeat_interleave(2, dim=-1)[..., ::2],
        gate=inputs["gate"].repeat_interleave(2, dim=-1)[..., ::2],
        carry=inputs["carry"].T.contiguous().T,
        mix_in=inputs["mix_in"].T.contiguous().T,
    )
    for case in (expanded, odd):
        results = []
        for function in (reference.update_field, update_field):
            leaves = [case[name].detach().requires_grad_() for name in NAMES]
            result = function(*leaves)
            # the sum's gradient has stride zero everywhere
            results.append([result, *torch.autograd.grad(result.sum(), leaves)])
        for plain, fused in zip(*results, strict=True):
            torch.testing.assert_close(fused, plain)


@pytest.mark.parametrize("device", DEVICES)
def test_no_tokens(device):
    inputs = {name: cast(x, device, torch.float32) for name, x in make_inputs(tokens=1).items()}
    empty = [inputs[name] for name in NAMES]
    empty[0], empty[1], empty[2] = empty[0][:, :, :0], empty[1][:, :, :0], empty[2][:, :0]
    result = update_field(*empty)
    assert result.shape == (2, 2, 0, 16)
    gradients = torch.autograd.grad(result.sum(), [inputs[name] for name in NAMES[3:]])
    assert all(not gradient.any() for gradient in gradients)


@pytest.mark.parametrize("device", DEVICES)
def test_only_wanted_gradients(device):
    """The first layer's field wants no gradient; frozen weights want none either."""
    check(make_inputs(), device, torch.float32, frozen=("field", "mix_in"))


@pytest.mark.gpu
@on_cuda
def test_runs_are_equal():
    """Sums over tokens have a fixed order: gradients repeat bit by bit. The interpreter knows no other order."""
    inputs = make_inputs(tokens=515)
    grad_output = torch.randn(inputs["field"].shape)
    first = run(update_field, inputs, "cuda", torch.bfloat16, grad_output=grad_output)
    second = run(update_field, inputs, "cuda", torch.bfloat16, grad_output=grad_output)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("device", DEVICES)
def test_a_broken_token_stays_alone(device):
    inputs = [cast(x, device, torch.float32).detach() for x in make_inputs(tokens=6).values()]
    whole = update_field(*inputs)
    inputs[0][:, :, 3] = torch.nan
    broken = update_field(*inputs)
    assert broken[:, :, 3].isnan().all()
    kept = [0, 1, 2, 4, 5]
    assert torch.equal(broken[:, :, kept], whole[:, :, kept])


@pytest.mark.parametrize("device", DEVICES)
def test_a_broken_token_stays_alone_in_gradients(device):
    """What is not a number, or infinite, in one token does not reach the gradients of another."""
    inputs = {name: cast(x, device, torch.bfloat16).detach() for name, x in make_inputs(tokens=17, dim=64).items()}
    inputs = {"grad_output": torch.randn(inputs["field"].shape).to(device, torch.bfloat16), **inputs}
    whole = fused_gradients(*inputs.values(), False, True)
    kept = [token for token in range(17) if token not in (3, 10)]
    for poisoned in ("grad_output", *NAMES[:3]):
        tensor = inputs[poisoned].clone()
        axis = 1 if poisoned == "gate" else 2
        tensor.select(axis, 3)[0] = torch.nan
        tensor.select(axis, 10)[0] = torch.inf
        broken = fused_gradients(*{**inputs, poisoned: tensor}.values(), False, True)
        seen = False
        for name, before, after in zip(NAMES[:3], whole, broken, strict=False):
            before, after = (x if name == "gate" else x.transpose(1, 2) for x in (before, after))
            assert torch.equal(before[:, kept], after[:, kept]), (poisoned, name)
            assert torch.equal(before[1], after[1]), (poisoned, name)
            seen |= bool(after[0, 3].isnan().any())
        assert seen, poisoned


@pytest.mark.parametrize("device", DEVICES)
def test_autocast(device):
    """As the plain version under autocast: products in bfloat16, the float32 field and weights keep their dtype."""
    inputs = make_inputs(tokens=9)
    grad_output = torch.randn(inputs["field"].shape, generator=torch.Generator().manual_seed(2)).bfloat16().double()
    exact = run(reference.update_field, inputs, "cpu", torch.float64, grad_output=grad_output)

    def under_autocast(function):
        def call(*arguments):
            with torch.autocast(device, torch.bfloat16):
                return function(*arguments)

        return call

    plain = run(under_autocast(reference.update_field), inputs, device, torch.float32, grad_output=grad_output)
    fused = run(under_autocast(update_field), inputs, device, torch.float32, grad_output=grad_output)
    for name, truth in exact.items():
        assert (fused[name] - truth).norm() <= 2 * (plain[name] - truth).norm() + 1e-6 * truth.norm(), name


@pytest.mark.parametrize(("complexity", "normalize"), [(1, False), (2, True)])
@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device, complexity, normalize):
    leaves = [cast(x, device, torch.float32) for x in make_inputs(parts=complexity, tokens=2).values()]
    torch.library.opcheck(fused_update, (*leaves, normalize))


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck_without_gates(device):
    leaves = [None if x is None else cast(x, device, torch.float32) for x in make_inputs(mix=False, tokens=2).values()]
    torch.library.opcheck(fused_update, (*leaves, False))


@pytest.mark.parametrize("device", DEVICES)
def test_compiled(device):
    inputs = make_inputs()
    grad_output = torch.randn(inputs["field"].shape)
    compiled = torch.compile(update_field, fullgraph=True, backend="aot_eager")
    eager = run(update_field, inputs, device, torch.float32, grad_output=grad_output)
    traced = run(compiled, inputs, device, torch.float32, grad_output=grad_output)
    assert all(torch.equal(eager[name], traced[name]) for name in eager)


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_for_any_length(device):
    compiled = torch.compile(update_field, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (3, 6):
        inputs = make_inputs(tokens=tokens)
        grad_output = torch.randn(inputs["field"].shape)
        eager = run(update_field, inputs, device, torch.float32, grad_output=grad_output)
        traced = run(compiled, inputs, device, torch.float32, grad_output=grad_output)
        assert all(torch.equal(eager[name], traced[name]) for name in eager)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_checkpointed(device, use_reentrant):
    def checkpointed(*arguments):
        return torch.utils.checkpoint.checkpoint(update_field, *arguments, use_reentrant=use_reentrant)

    inputs = make_inputs()
    grad_output = torch.randn(inputs["field"].shape)
    kept = run(update_field, inputs, device, torch.float32, grad_output=grad_output)
    recomputed = run(checkpointed, inputs, device, torch.float32, grad_output=grad_output)
    assert all(torch.equal(kept[name], recomputed[name]) for name in kept)


def count_fused(monkeypatch: pytest.MonkeyPatch, *arguments) -> int:
    calls = []
    monkeypatch.setattr("equitape.kernels.fused_update", lambda *given: calls.append(given) or given[0])
    update_field(*arguments)
    return len(calls)


def test_choice(monkeypatch):
    inputs = [x.float() for x in make_inputs().values()]
    monkeypatch.delenv("EQUITAPE_KERNELS")
    assert count_fused(monkeypatch, *inputs) == 0
    monkeypatch.setenv("EQUITAPE_KERNELS", "reference")
    assert count_fused(monkeypatch, *inputs) == 0
    monkeypatch.setenv("EQUITAPE_KERNELS", "fastest")
    with pytest.raises(ValueError, match="'fastest' is not one of auto, reference, triton"):
        update_field(*inputs)


@pytest.mark.gpu
@on_cuda
def test_choice_on_cuda(monkeypatch):
    inputs = [x.float().cuda() for x in make_inputs().values()]
    monkeypatch.delenv("EQUITAPE_KERNELS")
    assert count_fused(monkeypatch, *inputs) == 1
    assert count_fused(monkeypatch, *(x.double() for x in inputs)) == 0


@on_interpreter
@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"dim": 8}, "head dimension 8 is not from 16 to 256"),
        ({"groups": 33, "gates": 4}, "33 key-value heads, more than 32"),
        ({"groups": 1, "heads": 33, "parts": 2}, "33 query heads, more than 32"),
        ({"gates": 129}, "129 gates, more than 128"),
    ],
)
def test_forced_beyond_the_limits(change, complaint):
    inputs = [x.float() for x in make_inputs(**change).values()]
    with pytest.raises(ValueError, match=complaint):
        update_field(*inputs)


@on_interpreter
def test_forced_with_mixed_dtypes():
    inputs = [x.float() for x in make_inputs().values()]
    with pytest.raises(ValueError, match="differ in dtype"):
        update_field(inputs[0].bfloat16(), *inputs[1:])
    with pytest.raises(ValueError, match="bfloat16, float16 or float32"):
        update_field(*(x.double() for x in inputs))


def test_nothing_to_fuse():
    field = torch.randn(1, 2, 3, 16)
    assert update_field(field, None, None, None, None, None) is field
    normal = update_field(field, None, None, None, None, None, normalize=True)
    torch.testing.assert_close(2 * normal.square().mean(-1), torch.ones(1, 2, 3), atol=1e-4, rtol=0)
