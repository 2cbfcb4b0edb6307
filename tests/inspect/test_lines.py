"""One number per layer, computed again with plain loops."""

import math

import pytest

from cases import build, draw_tokens
from equitape.inspect import inspect_model

LENGTH = 9


@pytest.fixture(scope="module")
def inspection():
    return inspect_model(build("tape"), draw_tokens(1, LENGTH))


@pytest.fixture(scope="module")
def lines(inspection):
    return inspection.by_layer()


def mean(values):
    values = list(values)
    return sum(values) / len(values)


def near(values):
    """Curves keep four digits."""
    return [pytest.approx(value, rel=1e-3, abs=1e-6) for value in values]


def test_attention_that_differs_is_the_share_that_went_elsewhere(inspection, lines):
    """What a query gives to other keys than before counts once, not where it is taken and where it arrives."""
    expected = [
        mean(
            sum(max(float(change), 0.0) for change in inspection.attention_change[layer, head, query])
            for head in range(4)
            for query in range(LENGTH)
        )
        for layer in range(3)
    ]
    assert lines["attention moved by the update"] == near(expected)
    assert max(expected) > 0.05


def test_distances_differ_by_their_size(inspection, lines):
    """Keys that came closer and keys that went away do not cancel."""
    pairs = [(query, key) for query in range(LENGTH) for key in range(query + 1)]
    moved, alike = [], []
    for layer in range(3):
        cells = [(group, query, key) for group in range(2) for query, key in pairs]
        moved.append(mean(abs(float(inspection.distances[layer][cell]) - (cell[1] - cell[2])) for cell in cells))
        alike.append(mean(float(inspection.likeness[layer][cell]) for cell in cells))
    found = lines["effective minus true distance, tokens"]
    assert found[0] == pytest.approx(0, abs=1e-3)
    assert found[1:] == near(moved[1:])
    assert lines["likeness to rotary phasors"] == near(alike)


def test_norms_displacement_and_mixing(inspection, lines):
    tokens = [(group, token) for group in range(2) for token in range(LENGTH)]
    for title, values in (
        ("norm of the phasors", inspection.norms),
        ("phase displacement, radians", inspection.displacement),
    ):
        assert lines[title] == near(mean(float(values[layer][cell]) for cell in tokens) for layer in range(3))
    strength = lines["strength of mixing"]
    assert strength[:2] == near(mean(map(float, inspection.mixing_strength[layer])) for layer in range(2))
    # the last layer has nothing to update for
    assert strength[2] is None
    assert math.isnan(inspection.mixing_strength[2, 0])


def test_a_state_that_is_not_updated_has_no_curves():
    assert inspect_model(build("rope"), draw_tokens(1, LENGTH)).by_layer() == {}
