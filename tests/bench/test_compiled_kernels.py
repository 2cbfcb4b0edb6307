"""A compiled decoding step has few kernels: their number is its time for few sequences."""

import runpy
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "compiled_kernels.py"

pytestmark = pytest.mark.skipif(
    torch.__version__.split(".")[:2] != ["2", "13"], reason="the counts are those of torch 2.13"
)


@pytest.fixture(scope="module")
def count():
    return runpy.run_path(str(SCRIPT))["count_layer"]


def test_tape_adds_two_kernels_to_a_layer(count):
    """The output without the field, and the update. A decay, and layers that do not update, add none."""
    (plain,) = count({"kind": "rope"})
    assert count({"kind": "tape2", "layers": [0, 1]}) == [plain]
    assert count({"kind": "tape2"}) == [plain + 2]


def test_a_trained_decay_adds_two_kernels_to_a_layer(count):
    """Forward slopes and columns. Backward the sum for the slopes and the fused rotation, for two that are gone."""
    shape = {"batch": 2, "tokens": 64, "train": True}
    forward, backward = count({"kind": "tape2", "decay": "none"}, **shape)
    assert count({"kind": "tape2"}, **shape) == [forward + 2, backward]
