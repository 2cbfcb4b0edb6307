"""The update with complex weights, whose mixing matrices are made before the kernel, or which are applied in turn (the
twice-rule is in test_field.py).
"""

import pytest
import torch
from devices import DEVICES, needs_triton
from fields import cast, make_inputs, run

from equitape.kernels import reference, update_field
from equitape.kernels.operator import fused_gradients, fused_mix, fused_mix_backward, fused_update

pytestmark = needs_triton
both_ways = pytest.mark.parametrize("in_turn", [False, True], ids=["by matrices", "in turn"], indirect=True)


@pytest.fixture(autouse=True)
def in_turn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not getattr(request, "param", False):
        monkeypatch.setattr("equitape.kernels.FEW_FREQUENCIES", 0)


def kernel_inputs(device, **sizes):
    """Leaves: field, attended, mixing [B, N, 2, G, G] and carry."""
    inputs = make_inputs(parts=2, **sizes)
    mixing = reference.mixing_matrices(inputs["gate"], inputs["mix_in"], inputs["mix_out"])
    return [cast(x, device, torch.float32) for x in (inputs["field"], inputs["attended"], mixing, inputs["carry"])]


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device, normalize):
    torch.library.opcheck(fused_mix, (*kernel_inputs(device, tokens=2), normalize))


@both_ways
@pytest.mark.parametrize("device", DEVICES)
def test_strided_and_shared(device):
    """A field of stride zero over the batch, one whose axes lie in any order, and a gradient of stride zero."""
    inputs = {name: cast(x, device, torch.float32).detach() for name, x in make_inputs(parts=2).items()}
    shared = dict(inputs, field=inputs["field"][:1].expand(2, -1, -1, -1))
    odd = dict(
        inputs,
        field=inputs["field"].permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
        attended=inputs["attended"].repeat_interleave(2, dim=-1)[..., ::2],
        carry=inputs["carry"].mT.contiguous().mT,
    )
    for case in (shared, odd):
        results = []
        for function in (reference.update_field, update_field):
            leaves = [x.detach().requires_grad_() for x in case.values()]
            result = function(*leaves)
            results.append([result, *torch.autograd.grad(result.sum(), leaves)])
        for plain, fused in zip(*results, strict=True):
            torch.testing.assert_close(fused, plain)


@pytest.mark.parametrize("device", DEVICES)
def test_a_broken_token_stays_alone(device):
    inputs = [x.detach() for x in kernel_inputs(device, tokens=6)]
    slope = torch.randn_like(inputs[0])
    whole = (fused_mix(*inputs, True), *fused_mix_backward(slope, *inputs, True, True))
    inputs[0][:, :, 3] = torch.nan
    broken = (fused_mix(*inputs, True), *fused_mix_backward(slope, *inputs, True, True))
    kept = [0, 1, 2, 4, 5]
    # result, and gradients of field and attended field
    for before, after in zip(whole[:3], broken[:3], strict=True):
        assert after[:, :, 3].isnan().any()
        assert torch.equal(after[:, :, kept], before[:, :, kept])
    assert torch.equal(broken[3][:, kept], whole[3][:, kept])


@pytest.mark.parametrize("device", DEVICES)
def test_no_tokens(device):
    field, attended, mixing, carry = kernel_inputs(device, tokens=1)
    result = fused_mix(field[:, :, :0], attended[:, :, :0], mixing[:, :0], carry, True)
    assert result.shape == (2, 2, 0, 16)
    (gradient,) = torch.autograd.grad(result.sum(), [carry])
    assert not gradient.any()


@both_ways
@pytest.mark.parametrize("device", DEVICES)
def test_frozen_runs_equal_and_compiled(device):
    """Only wanted gradients; sums in a fixed order; the compiler's graph gives the same bits."""
    inputs, frozen = make_inputs(parts=2), ("field", "mix_in")
    slope = torch.randn(inputs["field"].shape)
    compiled = torch.compile(update_field, fullgraph=True, backend="aot_eager")
    first, second, traced = (
        run(function, inputs, device, torch.bfloat16, True, grad_output=slope, frozen=frozen)
        for function in (update_field, update_field, compiled)
    )
    for name in first:
        assert torch.equal(first[name], second[name])
        assert torch.equal(first[name], traced[name])


@both_ways
@pytest.mark.parametrize("device", DEVICES)
def test_autocast(device):
    """As the plain version under autocast: products in bfloat16, the float32 field and weights keep their dtype."""
    inputs = make_inputs(parts=2, tokens=9)
    slope = torch.randn(inputs["field"].shape, generator=torch.Generator().manual_seed(2)).bfloat16().double()
    exact = run(reference.update_field, inputs, "cpu", torch.float64, grad_output=slope)

    def under_autocast(function):
        def call(*arguments):
            with torch.autocast(device, torch.bfloat16):
                return function(*arguments)

        return call

    plain, fused = (
        run(under_autocast(function), inputs, device, torch.float32, grad_output=slope)
        for function in (reference.update_field, update_field)
    )
    for name, truth in exact.items():
        assert (fused[name] - truth).norm() <= 2 * (plain[name] - truth).norm() + 1e-6 * truth.norm(), name


@pytest.mark.parametrize("device", DEVICES)
def test_a_broken_token_stays_alone_in_turn(device):
    """Tokens of a tile are columns of one product."""
    inputs = [cast(x, device, torch.float32).detach() for x in make_inputs(parts=2, tokens=6).values()]
    slope = torch.randn_like(inputs[0])
    whole = (fused_update(*inputs, True), *fused_gradients(slope, *inputs, True, True))
    inputs[0][:, :, 3] = torch.nan
    broken = (fused_update(*inputs, True), *fused_gradients(slope, *inputs, True, True))
    kept = [0, 1, 2, 4, 5]
    # result, and gradients of field, attended field and gate
    for before, after in zip(whole[:3], broken[:3], strict=True):
        assert after[:, :, 3].isnan().any()
        assert torch.equal(after[:, :, kept], before[:, :, kept])
    assert torch.equal(broken[3][:, kept], whole[3][:, kept])


@pytest.mark.parametrize("device", DEVICES)
def test_no_tokens_in_turn(device):
    leaves = [cast(x, device, torch.float32) for x in make_inputs(parts=2, tokens=1).values()]
    field, attended, gate, *weights = leaves
    result = fused_update(field[:, :, :0], attended[:, :, :0], gate[:, :0], *weights, True)
    assert result.shape == (2, 2, 0, 16)
    assert not any(gradient.any() for gradient in torch.autograd.grad(result.sum(), weights))
