"""TAPE's move: the fused one against the plain, by the twice-rule."""

import pytest
import torch
from devices import DEVICES, INTERPRETED, needs_triton

from equitape.kernels import move_field, reference
from equitape.kernels.operator import fused_move, fused_move_backward

pytestmark = needs_triton
SHAPES = {
    # batch, heads, groups, tokens, head dimension
    "one": (1, 1, 1, 1, 16),
    "grouped": (2, 6, 2, 19, 16),
    "odd frequencies": (1, 3, 3, 5, 22),
    "wide": (1, 2, 1, 3, 256),
    # three programs, of 8, 8 and 3 tokens, where they are slow
    "many tokens": (1, 2, 2, 19, 32) if INTERPRETED else (2, 2, 2, 150, 32),
}


def draw(shape, seed=0):
    """A field, what attention made of it, two weights and a gradient, in float64 but rounded to bfloat16."""
    batch, heads, groups, tokens, dim = shape
    generator = torch.Generator().manual_seed(seed)

    def rounded(*sizes):
        return torch.randn(*sizes, generator=generator).bfloat16().double()

    # the heads of a token together, as attention writes them
    field, attended = (rounded(batch, tokens, count, dim).transpose(1, 2) for count in (groups, heads))
    return [field, attended, rounded(groups, heads), rounded(groups, heads)], rounded(batch, groups, tokens, dim)


def results(function, inputs, gradient):
    """The result and the gradients of all inputs."""
    inputs = [each.detach().requires_grad_() for each in inputs]
    output = function(*inputs)
    return [output.detach(), *torch.autograd.grad(output, inputs, gradient.to(output))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_fused_move_by_the_twice_rule(shape, dtype, device):
    inputs, gradient = draw(SHAPES[shape])
    exact = results(reference.move_field, inputs, gradient)
    inputs = [each.to(device, dtype) for each in inputs]
    plain = results(reference.move_field, inputs, gradient.to(device))
    for found, usual, true in zip(results(move_field, inputs, gradient.to(device)), plain, exact, strict=True):
        assert found.dtype == dtype
        error, allowed = ((each.cpu().double() - true).norm() for each in (found, usual))
        # sums in float32, in another order
        assert error <= 2 * allowed + 1e-6 * true.norm()


def test_gradients_in_float64():
    inputs, _ = draw(SHAPES["odd frequencies"])
    inputs = [each.requires_grad_() for each in inputs]
    assert torch.autograd.gradcheck(reference.move_field, inputs)


@pytest.mark.parametrize("device", DEVICES)
def test_a_field_shared_by_the_batch(device):
    inputs, gradient = draw(SHAPES["grouped"])
    inputs = [each.float().to(device) for each in inputs]
    inputs[0] = inputs[0][:1]
    plain = results(reference.move_field, inputs, gradient.to(device))
    for found, wanted in zip(results(move_field, inputs, gradient.to(device)), plain, strict=True):
        # float32, summed over tokens in another order
        assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_strided_operands(device):
    """The field is half of a widened value, and the attended field half of attention's output."""
    inputs, gradient = draw(SHAPES["grouped"])
    inputs = [each.float().to(device) for each in inputs]
    expected = results(reference.move_field, inputs, gradient.to(device))
    for index in (0, 1):
        dim = inputs[index].shape[-1]
        inputs[index] = torch.cat((torch.randn_like(inputs[index]), inputs[index]), dim=-1)[..., dim:]
    for found, wanted in zip(results(move_field, inputs, gradient.to(device)), expected, strict=True):
        # float32, summed over tokens in another order
        assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_operators_are_proper_ones(device):
    inputs, gradient = draw(SHAPES["grouped"])
    inputs = [each.float().to(device) for each in inputs]
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(fused_move, tuple(inputs), test_utils=checks)
    torch.library.opcheck(fused_move_backward, (gradient.float().to(device), *inputs), test_utils=checks)
