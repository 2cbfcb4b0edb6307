"""The operator behind PaTH: its gradients, its inverses and its description for torch.compile.

Its values are tested in tests/encodings/test_path.py.
"""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from cases import gap
from equitape.kernels import reflections


def draw(num_tokens, num_keys, dtype=torch.float64):
    """Two rows, two key-value heads of two query heads each; the second row's last token sees one key less."""
    torch.manual_seed(0)
    query = torch.randn(2, 4, num_tokens, 3, dtype=dtype, requires_grad=True)
    key, direction = (torch.randn(2, 2, num_keys, 3, dtype=dtype, requires_grad=True) for _ in range(2))
    last = torch.arange(num_keys - num_tokens, num_keys).repeat(2, 1)
    last[1, -1] -= 1
    return query, key, direction, last


def seen(last, num_keys):
    return torch.arange(num_keys) <= last[:, None, :, None]


@pytest.mark.parametrize(("num_tokens", "num_keys"), [(7, 7), (3, 9), (1, 5)])
def test_gradients_are_those_of_small_steps(num_tokens, num_keys, monkeypatch):
    monkeypatch.setattr(reflections, "BLOCK", 4)
    query, key, direction, last = draw(num_tokens, num_keys)

    def visible(*inputs):
        return reflections.reflected_products(*inputs, last, 0.5) * seen(last, num_keys)

    assert torch.autograd.gradcheck(visible, (query, key, direction))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_compiler_is_told_the_right_shapes_dtypes_and_strides(dtype):
    query, key, direction, last = draw(3, 9, dtype)
    # a direction in float32 beside queries in half precision, as the encoding has it
    direction = direction.detach().to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    torch.library.opcheck(reflections.reflected_products, (query, key, direction, last, 0.5))
    gradient = torch.randn(2, 4, 3, 9).to(dtype)
    torch.library.opcheck(
        reflections.reflected_products_backward, (gradient, query, key, direction, last, 0.5),
        test_utils=("test_schema", "test_faketensor"),
    )  # fmt: skip


def test_autocast_does_not_reach_the_products():
    query, key, direction, last = draw(7, 7, torch.float32)
    plain = reflections.reflected_products(query, key, direction, last, 0.5)
    expected = torch.autograd.grad(plain.sum(), (query, key, direction))
    with torch.autocast("cpu", torch.bfloat16):
        found = reflections.reflected_products(query, key, direction, last, 0.5)
        gradients = torch.autograd.grad(found.sum(), (query, key, direction))
    assert torch.equal(found, plain)
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_torch_counts_the_products_inside(device):
    """Of one head of 3 channels and 4 tokens, in one block."""
    query, key, direction = (torch.ones(1, 1, 4, 3, device=device, requires_grad=True) for _ in range(3))
    with FlopCounterMode(display=False) as counter:
        reflections.reflected_products(query, key, direction, torch.arange(4, device=device)[None], 1.0)
    of_blocks = 2 * (2 * 4 * 4 * 3) + 2 * 4 * 4 * (4 + 3)
    # two products for each of two inverses of 2 x 2, then for that of 4 x 4
    of_inverses = 2 * 2 * (2 * 1) + 2 * (2 * 2**3)
    of_queries = 3 * (2 * 4 * 4 * 3) + 2 * 4 * 4 * 4
    assert counter.get_total_flops() == of_blocks + of_inverses + of_queries


@pytest.mark.parametrize("size", [1, 2, 64])
def test_inverses(size):
    torch.manual_seed(0)
    below = torch.randn(3, 2, size, size, dtype=torch.float64).tril(-1) / 4
    whole = torch.eye(size, dtype=torch.float64) + below
    assert gap(reflections.invert(below) @ whole, torch.eye(size).expand_as(whole)) < 1e-12


def test_inverses_of_the_strongest_reflections_are_exact():
    """64 times the same mirror: the inverse has entries of at most 2, however large powers of L are."""
    below = torch.full((64, 64), 2.0).tril(-1)
    rows = torch.arange(64)[:, None] - torch.arange(64)
    expected = torch.where(rows > 0, 2.0 * (-1.0) ** rows, torch.eye(64))
    assert torch.equal(reflections.invert(below), expected)
