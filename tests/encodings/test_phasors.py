"""Products of phasor fields, their gradients, and what they keep for the backward pass."""

import pytest
import torch

from equitape.encodings.phasors import _opaque_phasors, multiply, phasors, turn


def draw(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def as_complex(x):
    real, imaginary = x.chunk(2, dim=-1)
    return torch.complex(real, imaginary)


@pytest.mark.parametrize("groups", [1, 2, 6])
def test_multiply_is_the_complex_product(groups):
    x, field = draw(2, 6, 5, 8), draw(2, groups, 5, 8)
    expected = as_complex(x) * as_complex(field).repeat_interleave(6 // groups, dim=1)
    assert torch.allclose(as_complex(multiply(x, field)), expected)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("groups", [1, 2, 6])
def test_turn_has_the_gradients_of_multiply(groups, batch):
    x, field = draw(2, 6, 5, 8), draw(batch, groups, 5, 8)
    slope = torch.randn(2, 6, 5, 8, dtype=torch.float64)
    expected = torch.autograd.grad(multiply(x, field), (x, field), slope)
    turned = turn(x, field)
    assert torch.equal(turned, multiply(x, field))
    for found, wanted in zip(torch.autograd.grad(turned, (x, field), slope), expected, strict=True):
        assert torch.allclose(found, wanted, rtol=1e-12, atol=1e-12)


def test_turn_by_zero_has_finite_gradients():
    x, field = draw(1, 2, 3, 4), torch.zeros(1, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    for gradient in torch.autograd.grad(turn(x, field).sum(), (x, field)):
        assert torch.equal(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize("scale", [1.0, 1e-3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gradients_are_as_good_as_plain_ones(dtype, scale):
    """The twice-rule, also for a field that has become small."""
    x, field = draw(2, 6, 33, 16), draw(2, 3, 33, 16)
    with torch.no_grad():
        field *= scale
    slope = torch.randn(2, 6, 33, 16, dtype=torch.float64)
    x, field, slope = (each.detach().to(dtype) for each in (x, field, slope))

    def gradients(product, wide):
        inputs = [each.to(wide).requires_grad_() for each in (x, field)]
        return [each.double() for each in torch.autograd.grad(product(*inputs), inputs, slope.to(wide))]

    exact = gradients(multiply, torch.float64)
    for found, plain, true in zip(gradients(turn, dtype), gradients(multiply, dtype), exact, strict=True):
        assert (found - true).norm() <= 2 * (plain - true).norm()


def test_turn_keeps_its_result_and_the_field():
    """The result is what attention keeps anyway; the input is not kept."""
    x, field = draw(2, 6, 5, 8), draw(2, 2, 5, 8)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: kept.append(each.data_ptr()) or each, lambda each: each):
        turned = turn(x, field)
    assert sorted(kept) == sorted([turned.data_ptr(), field.data_ptr()])


def test_the_opaque_operator_is_a_proper_one():
    ids, frequencies = torch.arange(7)[None], torch.rand(4, dtype=torch.float64)
    torch.library.opcheck(_opaque_phasors, (ids, frequencies, torch.float32))
    assert torch.equal(_opaque_phasors(ids, frequencies, torch.float32), phasors(ids, frequencies, torch.float32))
