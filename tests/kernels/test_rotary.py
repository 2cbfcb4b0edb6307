"""Gradients of rotations: the plain ones against autograd, the fused ones against the plain, by the twice-rule."""

import pytest
import torch
from devices import DEVICES, needs_triton

from equitape.encodings.heads import Columns
from equitape.encodings.phasors import apply_rotary, multiply
from equitape.kernels import (
    apply_rotary_backward,
    fused_rotary,
    fuses_rotary,
    put_frequencies,
    reference,
    take_frequencies,
)
from equitape.kernels.operator import fused_rotary_backward

pytestmark = needs_triton
SHAPES = {
    # batch, heads, groups, tokens, head dimension
    "one": (1, 1, 1, 1, 16),
    "grouped": (2, 6, 2, 37, 16),
    "odd frequencies": (1, 3, 3, 5, 22),
    "wide": (1, 2, 1, 3, 256),
    "many tokens": (1, 2, 2, 300, 32),
    "three times as many": (1, 4, 2, 9, 36),
}


def draw(shape, field_scale=1.0, seed=0):
    """Slopes, turned queries and keys, and a field, in float64 but rounded to bfloat16."""
    batch, heads, groups, tokens, dim = shape
    generator = torch.Generator().manual_seed(seed)

    def rounded(count, scale=1.0):
        # adjacent heads, as projections write them
        drawn = torch.randn(batch, tokens, count, dim, generator=generator) * scale
        return drawn.bfloat16().double().transpose(1, 2)

    query, key, field = rounded(heads), rounded(groups), rounded(groups, field_scale)
    query, key = (multiply(each, field).bfloat16().double() for each in (query, key))
    return rounded(heads), rounded(groups), query, key, field


@pytest.mark.parametrize("shape", SHAPES)
def test_plain_gradients_are_those_of_autograd(shape):
    grad_query, grad_key, query, key, field = draw(SHAPES[shape])
    ratio = query.shape[1] // field.shape[1]
    real, imaginary = field.chunk(2, dim=-1)
    conjugate = torch.cat((real, -imaginary), dim=-1)
    inverse = conjugate / (real.square() + imaginary.square()).repeat(1, 1, 1, 2)
    before = [multiply(query, inverse), multiply(key, inverse), field]
    before = [each.detach().requires_grad_() for each in before]
    turned = multiply(before[0], before[2].repeat_interleave(ratio, dim=1)), multiply(before[1], before[2])
    expected = torch.autograd.grad(turned, before, (grad_query, grad_key))
    found = reference.apply_rotary_backward(grad_query, grad_key, query, key, field)
    for each, wanted in zip(found, expected, strict=True):
        # float64 divided by a field that may come near to nothing, and multiplied again
        assert torch.allclose(each, wanted, rtol=1e-10, atol=1e-10)


def test_a_field_of_zero_gets_no_plain_gradient():
    """Nor do the queries and keys it turned; the other tokens keep theirs."""
    inputs = list(draw(SHAPES["grouped"]))
    whole = reference.apply_rotary_backward(*inputs)
    inputs[4] = inputs[4].clone()
    inputs[4][:, :, ::2] = 0
    found = reference.apply_rotary_backward(*inputs)
    for each, before in zip(found, whole, strict=True):
        assert torch.equal(each[:, :, ::2], torch.zeros_like(each[:, :, ::2]))
        assert torch.equal(each[:, :, 1::2], before[:, :, 1::2])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_fused_gradients_by_the_twice_rule(shape, dtype, device):
    inputs = draw(SHAPES[shape], field_scale=0.5)
    exact = reference.apply_rotary_backward(*inputs)
    inputs = [each.to(device, dtype) for each in inputs]
    plain = reference.apply_rotary_backward(*inputs)
    for found, usual, true in zip(apply_rotary_backward(*inputs), plain, exact, strict=True):
        assert found.dtype == dtype
        error, allowed = ((each.cpu().double() - true).norm() for each in (found, usual))
        # both compute in float32 and round once; orders of summation differ
        assert error <= 2 * allowed + 1e-6 * true.norm()


@pytest.mark.parametrize("device", DEVICES)
def test_a_field_of_zero_gets_no_gradient(device):
    inputs = [each.float().to(device) for each in draw(SHAPES["grouped"])]
    inputs[4][:, :, ::2] = 0
    found = apply_rotary_backward(*inputs)
    assert all(torch.isfinite(each).all() for each in found)
    assert not found[2][:, :, ::2].any()
    assert found[2][:, :, 1::2].any()


@pytest.mark.parametrize("device", DEVICES)
def test_strided_operands(device):
    """The field is half of a widened value, and attention's gradients lie as attention likes."""
    grad_query, grad_key, query, key, field = (each.float().to(device) for each in draw(SHAPES["grouped"]))
    expected = reference.apply_rotary_backward(grad_query, grad_key, query, key, field)
    widened = torch.cat((torch.randn_like(field), field), dim=-1)[..., field.shape[-1] :]
    sparse = key.repeat_interleave(2, dim=-1)[..., ::2]
    found = apply_rotary_backward(grad_query.contiguous(), grad_key.contiguous(), query.contiguous(), sparse, widened)
    for each, wanted in zip(found, expected, strict=True):
        # float32, summed in another order
        assert torch.allclose(each, wanted, rtol=1e-5, atol=1e-5)
    assert found[0].transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("device", DEVICES)
def test_operator_is_a_proper_one(device):
    inputs = [each.float().to(device) for each in draw(SHAPES["grouped"])]
    for others in ((), (0, inputs[4][..., :4])):
        every = (*inputs, *others)
        torch.library.opcheck(fused_rotary_backward, every, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize(
    ("shape", "count"), [("grouped", 1), ("grouped", 2), ("grouped", 4), ("many tokens", 8), ("three times as many", 6)]
)
def test_changed_frequencies_get_the_gradient(shape, count, heads, device):
    """Those of the whole field, from a start that all heads and rows share or not, and changed numbers between others."""
    grad_query, grad_key, query, key, field = (each.float().to(device) for each in draw(SHAPES[shape]))
    start = torch.randn(1, heads, *field.shape[2:], device=device)
    wide = torch.randn(field.shape[0], field.shape[2], field.shape[1], 2 * count + 3, device=device)
    changed = wide[..., 3:].transpose(1, 2)
    whole = put_frequencies(start, changed)
    assert torch.equal(take_frequencies(whole, count), changed)
    inputs = (grad_query, grad_key, multiply(query, whole), multiply(key, whole))
    for replaced in (0, 1):
        *expected, of_whole = reference.apply_rotary_backward(*inputs, whole, replaced)
        expected.append(take_frequencies(of_whole, count))
        for function in (apply_rotary_backward, reference.apply_rotary_backward):
            for each, wanted in zip(function(*inputs, start, replaced, changed), expected, strict=True):
                # float32, summed in another order and divided by a field that may come near to nothing
                assert torch.allclose(each, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_turn_trains_through_the_fused_gradients(device):
    batch, heads, groups, tokens, dim = SHAPES["grouped"]
    inputs = [torch.randn(batch, count, tokens, dim, device=device) for count in (heads, groups, groups)]
    inputs = [each.requires_grad_() for each in inputs]
    grad_outputs = [torch.randn_like(each) for each in inputs[:2]]
    query, key, field = inputs
    expected = torch.autograd.grad((multiply(query, field), multiply(key, field)), inputs, grad_outputs)
    for found, wanted in zip(torch.autograd.grad(apply_rotary(*inputs), inputs, grad_outputs), expected, strict=True):
        # float32 divided by a field that may come near to nothing
        assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("shape", "inside"), [("odd frequencies", None), ("odd frequencies", 2), ("grouped", 1)])
def test_replaced_frequencies_get_no_gradient(shape, inside, device):
    """The others get those of a slope that is zero there."""
    inputs = [each.float().to(device) for each in draw(SHAPES[shape])]
    half, replaced, groups = inputs[4].shape[-1] // 2, 2, inputs[4].shape[1]
    gone = [*range(half - replaced, half), *range(2 * half - replaced, 2 * half)]
    first = [each.shape[1] // groups * (groups if inside is None else inside) for each in inputs]
    zeroed = [each.clone() for each in inputs]
    for slope, heads in zip(zeroed[:2], first, strict=False):
        slope[:, :heads, :, gone] = 0
    expected = reference.apply_rotary_backward(*zeroed)
    others = (replaced, None, inside)
    for found in (apply_rotary_backward(*inputs, *others), reference.apply_rotary_backward(*inputs, *others)):
        for each, wanted, heads in zip(found, expected, (*first[:2], first[4]), strict=True):
            assert not each[:, :heads, :, gone].any()
            assert heads == each.shape[1] or each[:, heads:, :, gone].any()
            # float32, summed in another order
            assert torch.allclose(each, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("inside", [None, "all", "half"])
@pytest.mark.parametrize(
    ("shape", "count", "dtype"),
    [
        ("one", 0, torch.float32),
        ("one", 4, torch.float32),
        ("grouped", 0, torch.float32),
        ("grouped", 1, torch.float32),
        ("grouped", 2, torch.float32),
        ("grouped", 4, torch.bfloat16),
        ("odd frequencies", 0, torch.bfloat16),
        ("many tokens", 0, torch.bfloat16),
        ("many tokens", 4, torch.float32),
        ("three times as many", 6, torch.float32),
    ],
)
def test_fused_rotation_with_columns_by_the_twice_rule(shape, count, inside, dtype, device):
    """count: of changed frequencies, 0 for a whole field. Columns of queries are shared by the tokens, those of keys by
    the heads.
    """
    batch, heads, groups, tokens, dim = SHAPES[shape]
    generator = torch.Generator().manual_seed(1)

    def draw(*sizes):
        return torch.randn(*sizes, generator=generator).bfloat16().double()

    query, key = (draw(batch, tokens, number, dim).transpose(1, 2) for number in (heads, groups))
    field = draw(1, 1 if count else groups, tokens, dim)
    changed = draw(batch, groups, tokens, 2 * count) if count else None
    inside = {None: None, "all": groups, "half": groups // 2}[inside]
    columns = Columns(draw(1, heads, 1, 4), draw(batch, 1, tokens, 4), inside)

    def plainly(query, key, field, changed, *columns):
        whole = field if changed is None else put_frequencies(field, changed)
        counts = (None, None) if inside is None else (inside * heads // groups, inside)
        return [multiply(*each) for each in zip((query, key), (whole, whole), columns, counts, strict=True)]

    given = (query, key, field, changed, columns.query, columns.key)
    exact = plainly(*given)
    given = [None if each is None else each.to(device, dtype) for each in given]
    assert fuses_rotary(*given[:5])
    plain, found = plainly(*given), apply_rotary(*given[:3], Columns(*given[4:], inside), given[3])
    for each, usual, true in zip(found, plain, exact, strict=True):
        assert each.dtype == dtype
        assert each.shape == true.shape
        assert each.transpose(1, 2).is_contiguous()
        error, allowed = ((one.cpu().double() - true).norm() for one in (each, usual))
        # float32, rounded once
        assert error <= 2 * allowed + 1e-6 * true.norm()


@pytest.mark.parametrize("device", DEVICES)
def test_rotation_operator_is_a_proper_one(device):
    _, _, query, key, field = (each.float().to(device) for each in draw(SHAPES["grouped"]))
    columns = torch.randn(1, query.shape[1], 1, 4, device=device), torch.randn(1, 1, key.shape[2], 4, device=device)
    for changed, inside in ((None, None), (field[..., :4], 1)):
        inputs = (query, key, field, changed, *columns, inside)
        torch.library.opcheck(fused_rotary, inputs, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("inside", [None, 1, 2])
def test_training_through_the_fused_rotation(inside, device):
    """Gradients of queries, keys, field and columns are those of the plain form."""
    batch, heads, groups, tokens, dim = SHAPES["grouped"]
    sizes = [(batch, heads, tokens, dim), (batch, groups, tokens, dim), (batch, groups, tokens, dim)]
    sizes += [(1, heads, 1, 4), (batch, 1, tokens, 4)]
    inputs = [torch.randn(*size, device=device).requires_grad_() for size in sizes]
    query, key, field, *columns = inputs
    of_heads = None if inside is None else inside * heads // groups
    expected = multiply(query, field, columns[0], of_heads), multiply(key, field, columns[1], inside)
    grad_outputs = [torch.randn_like(each) for each in expected]
    wanted = torch.autograd.grad(expected, inputs, grad_outputs)
    found = apply_rotary(query, key, field, Columns(*columns, inside))
    for each, true in zip(
        (*found, *torch.autograd.grad(found, inputs, grad_outputs)), (*expected, *wanted), strict=True
    ):
        # float32 divided by a field that may come near to nothing
        assert torch.allclose(each, true, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_columns_alone_get_a_gradient(device):
    """The slopes of a decay train also where queries, keys and field do not."""
    _, _, query, key, field = (each.float().to(device) for each in draw(SHAPES["grouped"]))
    of_query = torch.randn(1, query.shape[1], 1, 4, device=device, requires_grad=True)
    columns = Columns(of_query, torch.randn(1, 1, key.shape[2], 4, device=device), 1)
    rotated, _ = apply_rotary(query, key, field, columns)
    (gradient,) = torch.autograd.grad(rotated.sum(), of_query)
    expected = torch.zeros_like(gradient)
    # the heads of the first group, which alone has columns
    expected[:, : query.shape[1] // key.shape[1]] = query.shape[0] * query.shape[2]
    assert torch.equal(gradient, expected)


def test_a_rotation_alone_is_left_to_the_compiler():
    _, _, query, key, field = (each.float() for each in draw(SHAPES["grouped"]))
    assert not fuses_rotary(query, key, field, None, None)
