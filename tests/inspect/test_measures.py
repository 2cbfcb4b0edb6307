"""The measures against their formulas written out, and on fields whose answer is known."""

import math

import pytest
import torch

from cases import build, gap
from equitape.inspect.inspection import (
    effective_distances,
    phase_displacement,
    phasor_norms,
    rotary_frequencies,
    state_products,
)

FREQUENCIES = 10000.0 ** -(torch.arange(8, dtype=torch.float64) / 8)


def phasors(places):
    """[P, M]."""
    return torch.exp(1j * torch.as_tensor(places, dtype=torch.float64)[:, None] * FREQUENCIES)


def halves(z):
    return torch.cat((z.real, z.imag), dim=-1)


def test_products_norms_and_displacement_by_loops():
    torch.manual_seed(0)
    z, start = torch.randn(2, 2, 5, 8, dtype=torch.complex128)
    products = state_products(halves(z))
    for i in range(5):
        for j in range(5):
            expected = sum((z[g, i, m].conj() * z[g, j, m]).real for g in range(2) for m in range(8))
            assert products[i, j].item() == pytest.approx(expected.item())
    norms, moved = phasor_norms(halves(z)), phase_displacement(halves(z), halves(start))
    for g in range(2):
        for n in range(5):
            assert norms[g, n].item() == pytest.approx(math.sqrt(sum(abs(z[g, n, m]) ** 2 for m in range(8)) / 8))
            angles = [abs(torch.angle(z[g, n, m] / start[g, n, m])) for m in range(8)]
            assert moved[g, n].item() == pytest.approx(sum(angles).item() / 8)


@pytest.mark.parametrize("distance", [-20.0, 0.0, 3.0, 41.0, 60.0, 7.25])
def test_distance_of_rotary_phasors_is_their_distance(distance):
    keys = torch.arange(10.0)
    found, likeness = effective_distances(phasors(keys + distance), phasors(keys), FREQUENCIES, 40)
    # between whole numbers the parabola is an approximation
    assert gap(found, torch.full((10,), distance)) < (1e-9 if distance % 1 == 0 else 0.05)
    assert likeness.min() > (1 - 1e-9 if distance % 1 == 0 else 0.98)


def test_distance_is_not_changed_by_turning_frequencies_or_by_size():
    torch.manual_seed(0)
    queries, keys = torch.randn(2, 30, 8, dtype=torch.complex128)
    turn = torch.exp(1j * 6.3 * torch.rand(8, dtype=torch.float64))
    plain = effective_distances(queries, keys, FREQUENCIES, 50)
    turned = effective_distances(3 * queries * turn, 0.1 * keys * turn, FREQUENCIES, 50)
    assert gap(plain[0], turned[0]) < 1e-9
    assert gap(plain[1], turned[1]) < 1e-9
    # noise is not like any distance
    assert plain[1].max() < 0.95
    assert plain[1].min() >= 0


def test_distance_finds_the_best_by_brute_force():
    torch.manual_seed(1)
    queries, keys = torch.randn(2, 20, 8, dtype=torch.complex128)
    found, _ = effective_distances(queries, keys, FREQUENCIES, 30)
    for pair in range(20):
        likeness = {
            d: sum(
                (keys[pair, m].conj() * queries[pair, m] * torch.exp(-1j * FREQUENCIES[m] * d)).real for m in range(8)
            )
            for d in range(-30, 61)
        }
        assert abs(found[pair].item() - max(likeness, key=likeness.get)) <= 0.5


@pytest.mark.parametrize(
    ("case", "options"),
    [("rope", {}), ("tape", {}), ("tape", {"scaling": {"kind": "linear", "factor": 4.0}}), ("rope-dynamic", {})],
)
def test_frequencies_are_those_of_the_encoding(case, options):
    encoding = build(case, options).model.encoding
    found = rotary_frequencies(encoding, 32)
    plain = 10000.0 ** -(torch.arange(4, dtype=torch.float64) / 4)
    if options:
        plain = plain / 4
    if case == "rope-dynamic":
        # factor 2 at four times the trained length
        plain = (10000.0 * (2 * 32 / 8 - 1) ** (8 / 6)) ** -(torch.arange(4, dtype=torch.float64) / 4)
    assert gap(found, plain) < 1e-12
