"""The public operators: equal to their definitions, and clear about wrong shapes."""

import pytest
import torch

from cases import gap
from equitape import ops
from equitape.kernels import reference


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


FIELD, ATTENDED, GATE = draw(1, 2, 5, 8), draw(3, 4, 5, 8, seed=1), draw(3, 5, 6, seed=2)
CARRY, MIX_IN, MIX_OUT = draw(2, 4, seed=3), draw(6, 2, seed=4), draw(2, 6, seed=5)


def test_update_and_move_are_their_definitions():
    given = (FIELD, ATTENDED, GATE, CARRY, MIX_IN, MIX_OUT)
    assert gap(ops.update_field(*given, normalize=True), reference.update_field(*given, normalize=True)) == 0
    moved = (FIELD, ATTENDED, CARRY, CARRY.flip(0))
    assert gap(ops.move_field(*moved), reference.move_field(*moved)) == 0


def test_one_token_computes_its_gates():
    features, weight = draw(3, 1, 7), draw(6, 7, seed=1)
    field, attended = FIELD[:, :, :1], ATTENDED[:, :, :1]
    found = ops.update_token(field, attended, features, weight, CARRY, MIX_IN, MIX_OUT)
    expected = ops.update_field(field, attended, features @ weight.T, CARRY, MIX_IN, MIX_OUT)
    assert gap(found, expected) < 1e-12


def test_phasors_are_rope_s():
    ids, frequencies = torch.tensor([[0, 3, 7]]), draw(4)
    angles = ids[0, :, None] * frequencies
    found = ops.phasors(ids, frequencies, torch.float64)
    assert gap(found[0, 0], torch.cat((angles.cos(), angles.sin()), -1)) == 0


def test_rotation_is_a_complex_product_with_its_gradients():
    query, key, field = draw(1, 4, 3, 8), draw(1, 2, 3, 8, seed=1), draw(1, 2, 3, 8, seed=2)
    turned, _ = ops.apply_rotary(query, key, field)
    z = torch.complex(*field.chunk(2, -1)).repeat_interleave(2, dim=1)
    expected = torch.complex(*query.chunk(2, -1)) * z
    assert gap(turned, torch.cat((expected.real, expected.imag), -1)) < 1e-14
    inputs = [each.requires_grad_() for each in (query, key, field)]
    assert torch.autograd.gradcheck(ops.apply_rotary, inputs)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.update_field(FIELD[0], None, None, None, None, None), "The field has shape [2, 5, 8]; it must be"),
        (lambda: ops.update_field(FIELD, ATTENDED, None, None, None, None), "attended and carry belong together"),
        (lambda: ops.update_field(FIELD, ATTENDED, None, CARRY.T, None, None), "carry has shape [4, 2]; it must be [2, 4]"),
        (lambda: ops.move_field(FIELD, ATTENDED[:, :3], CARRY, CARRY), "attended has shape [3, 3, 5, 8], which does not fit"),
        (lambda: ops.apply_rotary(ATTENDED, ATTENDED[..., :4], FIELD), "key has shape [3, 4, 5, 4], which does not fit"),
        (lambda: ops.apply_rotary(ATTENDED, ATTENDED[:1], FIELD), "key [1, 4, 5, 8]; they must have equally many rows"),
        (lambda: ops.apply_rotary(ATTENDED, ATTENDED[:, :3], FIELD[:, :1]), "a multiple of key's heads"),
        (
            lambda: ops.update_field(FIELD, ATTENDED, GATE[:1], CARRY, MIX_IN, MIX_OUT),
            "gate has shape [1, 5, 6], which does not fit the field",
        ),
        (lambda: ops.update_field(FIELD, None, GATE[:, :1], None, MIX_IN, MIX_OUT), "it must be [3, 5, any]"),
        (
            lambda: ops.update_token(FIELD[:, :, :1], ATTENDED[:, :, :1], GATE[:1, :1], draw(6, 6), CARRY, MIX_IN, MIX_OUT),
            "features has shape [1, 1, 6], which does not fit the field",
        ),
        (lambda: ops.phasors(draw(1, 5), draw(2, 4), torch.float64), "ids has shape [1, 5] and frequencies [2, 4]; they"),
        (
            lambda: ops.update_token(FIELD, ATTENDED, GATE, MIX_IN, CARRY, MIX_IN, MIX_OUT),
            "this operator takes one token per sequence",
        ),
    ],
)  # fmt: skip
def test_wrong_shapes_are_refused(call, message):
    with pytest.raises(ValueError, match=r".") as error:
        call()
    assert message in str(error.value)
