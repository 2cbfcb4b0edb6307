"""A compiled decoding step has few kernels: their number is its time for few sequences."""

import runpy
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "compiled_kernels.py"


@pytest.mark.skipif(torch.__version__.split(".")[:2] != ["2", "13"], reason="the counts are those of torch 2.13")
def test_tape_adds_two_kernels_to_a_layer():
    """The output without the field, and the update. A decay, and layers that do not update, add none."""
    count = runpy.run_path(str(SCRIPT))["count_layer"]
    plain = count({"kind": "rope"})
    assert count({"kind": "tape2", "layers": [0, 1]}) == plain
    assert count({"kind": "tape2"}) == plain + 2
