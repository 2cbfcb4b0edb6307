"""Positions with several axes: images, video, sound, and text next to them."""

import math

import pytest
import torch

from cases import gap, randomise
from equitape.encodings.frequencies import UNSCALED, axis_frequencies, directions
from equitape.encodings.phasors import phasors
from equitape.nn import Attention, grid_ids, join_ids, make_encoding, token_ids

CPU = torch.device("cpu")
KINDS = {
    "rope": {},
    "tape": {},
    "tape-options": {"move": True, "normalize": True, "complex_mixing": True},
    "tape-fourier": {"init": "fourier"},
    "tensor_tape": {},
}


def layers_on(axes, case="tape", mixed=False, **options):
    """Two layers with random weights, the second with an update too, in float64."""
    chosen = {"kind": case.split("-")[0], **KINDS[case]}
    encoding = make_encoding(chosen, 32, 2, 3, num_kv_heads=1, num_axes=axes, mixed_axes=mixed)
    made = []
    for index in range(2):
        attention = Attention(32, 2, encoding, layer=index, **{"causal": False, **options})
        randomise(attention, index)
        made.append(attention.double())
    return made


def run(layers, x, ids, **inputs):
    """Output and state of the last layer, and the scores of all."""
    state, scores = None, []
    for attention in layers:
        attention.implementation = "eager"
        whole = attention.attend

        def record(*given, whole=whole, **rest):
            found = whole(*given, **rest)
            scores.append(found.weights)
            return found

        attention.attend = record
        x, state = attention(x, state, positions=ids, **inputs)
        attention.attend = whole
    return x, state, torch.stack(scores)


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("case", KINDS)
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("sizes", [(3, 4), (2, 2, 3)])
def test_a_shift_along_any_axis_changes_no_score(case, mixed, sizes):
    layers, ids = layers_on(len(sizes), case, mixed), grid_ids(*sizes)
    x = draw(2, len(ids), 32)
    y, _, scores = run(layers, x, ids)
    for axis in range(len(sizes)):
        for step in (1, 12345, 0.37):
            offset = torch.zeros(len(sizes), dtype=torch.float64)
            offset[axis] = step
            moved, _, others = run(layers, x, ids + offset)
            assert gap(scores, others) < 1e-10
            assert gap(y, moved) < 1e-10
        one = ids.clone()
        one[0, axis] += 1
        assert gap(run(layers, x, one)[2], scores) > 1e-4


@pytest.mark.parametrize("mixed", [False, True])
def test_the_tensor_form_agrees_on_two_axes(mixed):
    """An independent oracle for the whole update."""
    tape, tensors = (layers_on(2, case, mixed) for case in ("tape", "tensor_tape"))
    for ours, theirs in zip(tape, tensors, strict=True):
        theirs.load_state_dict(ours.state_dict())
    x, ids = draw(2, 12, 32), grid_ids(3, 4)
    assert gap(run(tape, x, ids)[0], run(tensors, x, ids)[0]) < 1e-12


def test_axial_frequencies_are_those_of_axial_rope():
    """Half of the channels turn with the row and half with the column, each like a head of half the size."""
    geometry = make_encoding("rope", 16, 1, 2, num_axes=2).geometry
    found = axis_frequencies(geometry, 100.0, UNSCALED, CPU)
    expected = torch.zeros(2, 8, dtype=torch.float64)
    for axis in range(2):
        for index in range(4):
            expected[axis, 2 * index + axis] = 100.0 ** (-2 * index / 8)
    assert gap(found, expected) < 1e-15


def test_three_axes_share_frequencies_as_evenly_as_possible():
    geometry = make_encoding("rope", 16, 1, 2, num_axes=3).geometry
    found = axis_frequencies(geometry, 100.0, UNSCALED, CPU)
    assert (found > 0).sum(1).tolist() == [3, 3, 2]
    assert (found > 0).sum(0).tolist() == [1] * 8
    assert found.max(1).values.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("axes", [2, 3])
def test_directions_have_length_one_and_point_everywhere(axes):
    found = directions(512, axes, CPU)
    assert gap(found.norm(dim=0), torch.ones(512)) < 1e-12
    spread = found @ found.T / 512
    assert gap(spread, torch.eye(axes) / axes) < 0.02
    assert float(found.mean(1).abs().max()) < 0.05


def test_phasors_on_two_axes_and_their_gradient():
    frequencies = draw(2, 3)
    ids = draw(1, 4, 2, seed=1).requires_grad_()
    angle = ids[0] @ frequencies
    expected = torch.cat((angle.cos(), angle.sin()), -1)
    assert gap(phasors(ids, frequencies, torch.float64)[0, 0], expected) < 1e-14
    assert torch.autograd.gradcheck(lambda ids: phasors(ids, frequencies, torch.float64), ids)


def test_words_and_patches_follow_each_other():
    """Two registers, a 2 x 3 image, two words: words have one number on all axes, one above all before."""
    ids = join_ids(token_ids(2, 2), grid_ids(2, 3), token_ids(2, 2))
    patches = [[2, 2], [2, 3], [2, 4], [3, 2], [3, 3], [3, 4]]
    assert ids.tolist() == [[0, 0], [1, 1], *patches, [5, 5], [6, 6]]


def test_words_alone_turn_as_on_one_axis():
    """A text without an image depends on differences of its ids only, as with one axis."""
    layers = layers_on(2)
    x = draw(1, 5, 32)
    scores = run(layers, x, token_ids(5, 2))[2]
    assert gap(run(layers, x, token_ids(5, 2) + 7)[2], scores) < 1e-12


@pytest.mark.parametrize("causal", [False, True])
def test_a_window_on_two_axes_is_a_square(causal):
    ids = grid_ids(4, 5)
    near = ((ids[:, None] - ids).abs() < 2).all(-1)
    if causal:
        near &= torch.ones(20, 20).tril().bool()
    windowed, masked = layers_on(2, window=2, causal=causal), layers_on(2, causal=causal)
    x = draw(2, 20, 32)
    assert near.sum(1).max() == (5 if causal else 9)
    assert gap(run(windowed, x, ids)[0], run(masked, x, ids, mask=near)[0]) < 1e-12


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (lambda: grid_ids(3, 0), "The grid has sizes (3, 0); give one whole number of 1 or more per axis."),
        (lambda: token_ids(-1, 2), "There are -1 tokens on 2 axes; give 0 tokens or more, and 1 axis or more."),
        (
            lambda: join_ids(grid_ids(2, 2), token_ids(2, 3)),
            "The parts have shapes [[4, 2], [2, 3]]; each must be [N, A], all with the same number of axes A.",
        ),
    ],
)
def test_wrong_grids_are_refused(parts, message):
    with pytest.raises(ValueError, match=r".") as error:
        parts()
    assert str(error.value) == message


def test_half_precision_has_angles_of_full_precision():
    frequencies = axis_frequencies(make_encoding("rope", 16, 1, 2, num_axes=2).geometry, 1e4, UNSCALED, CPU)
    ids = torch.tensor([[[1_000_003, 7]]])
    found = phasors(ids, frequencies, torch.bfloat16)[0, 0, 0, 0]
    assert abs(float(found) - math.cos(1_000_003)) < 4e-3
