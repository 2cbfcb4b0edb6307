"""Products of phasor fields, their gradients, and what they keep for the backward pass."""

import pytest
import torch

from equitape.encodings.phasors import _opaque_phasors, apply_rotary, multiply, phasors


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


def draw_all(groups, batch=2, dtype=torch.float64):
    return draw(2, 6, 5, 8, dtype=dtype), draw(2, groups, 5, 8, dtype=dtype), draw(batch, groups, 5, 8, dtype=dtype)


def plain_rotary(query, key, field):
    return multiply(query, field), multiply(key, field)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("groups", [1, 2, 6])
def test_turn_has_the_gradients_of_multiply(groups, batch):
    inputs = draw_all(groups, batch)
    turned, expected = apply_rotary(*inputs), plain_rotary(*inputs)
    assert all(torch.equal(found, wanted) for found, wanted in zip(turned, expected, strict=True))
    grad_outputs = [torch.randn_like(each) for each in turned]
    expected = torch.autograd.grad(expected, inputs, grad_outputs)
    for found, wanted in zip(torch.autograd.grad(turned, inputs, grad_outputs), expected, strict=True):
        # float64, and divided by the field once more
        assert torch.allclose(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("narrow", [torch.float64, torch.float32], ids=["one dtype", "two dtypes"])
def test_compiled_turn_has_gradients(narrow):
    """torch 2.11 compiled a cast to the dtype at hand into a function without gradients, silently."""
    query, key, field = draw_all(3)
    inputs = [query.detach().to(narrow).requires_grad_(), key.detach().to(narrow).requires_grad_(), field]
    grad_outputs = [torch.randn_like(each) for each in inputs[:2]]
    compiled = torch.compile(apply_rotary, fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad(apply_rotary(*inputs), inputs, grad_outputs)
    for found, wanted in zip(torch.autograd.grad(compiled(*inputs), inputs, grad_outputs), expected, strict=True):
        assert torch.allclose(found, wanted)


@pytest.mark.parametrize("scale", [1.0, 1e-3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gradients_are_as_good_as_plain_ones(dtype, scale):
    """The twice-rule, also for a field that has become small."""
    query, key, field = (each.detach() for each in draw_all(3))
    rounded = [each.to(dtype) for each in (query, key, scale * field)]
    grad_outputs = [torch.randn_like(each) for each in rounded[:2]]

    def gradients(function, wide):
        inputs = [each.to(wide).requires_grad_() for each in rounded]
        found = torch.autograd.grad(function(*inputs), inputs, [each.to(wide) for each in grad_outputs])
        return [each.double() for each in found]

    exact = gradients(plain_rotary, torch.float64)
    for found, plain, true in zip(gradients(apply_rotary, dtype), gradients(plain_rotary, dtype), exact, strict=True):
        assert (found - true).norm() <= 2 * (plain - true).norm()


def test_turn_keeps_its_results_and_the_field():
    """The results are what attention keeps anyway; what they were before is not kept."""
    query, key, field = draw_all(2)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: kept.append(each.data_ptr()) or each, lambda each: each):
        turned = apply_rotary(query, key, field)
    assert sorted(kept) == sorted(each.data_ptr() for each in (*turned, field))


def test_the_opaque_operator_is_a_proper_one():
    ids, frequencies = torch.arange(7)[None], torch.rand(4, dtype=torch.float64)
    torch.library.opcheck(_opaque_phasors, (ids, frequencies, torch.float32))
    assert torch.equal(_opaque_phasors(ids, frequencies, torch.float32), phasors(ids, frequencies, torch.float32))


def test_a_wider_field_leaves_queries_and_keys_in_their_dtype():
    """As under autocast: the field in float32, queries and keys in bfloat16."""
    query, key, field = draw_all(2, dtype=torch.float32)
    rounded = [each.detach().bfloat16().requires_grad_() for each in (query, key)]
    turned = apply_rotary(*rounded, field)
    assert {each.dtype for each in turned} == {torch.bfloat16}
    grad_outputs = [torch.randn_like(each) for each in turned]
    found = torch.autograd.grad(turned, (*rounded, field), grad_outputs)
    assert [each.dtype for each in found] == [torch.bfloat16, torch.bfloat16, torch.float32]
    exact = [each.detach().double().requires_grad_() for each in (*rounded, field)]
    expected = torch.autograd.grad(plain_rotary(*exact), exact, [each.double() for each in grad_outputs])
    for each, wanted in zip(found, expected, strict=True):
        # bfloat16 rounds to 2^-9, twice on the way
        assert (each.double() - wanted).norm() <= 1e-2 * wanted.norm()
