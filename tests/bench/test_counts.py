"""The work of one layer, held to a committed table: a change that costs launches, traffic or operations shows here."""

import json
from pathlib import Path

import pytest
import torch
from layer_counts import COUNTED, CountingMode, count_layer, minor_version

from equitape.bench.workloads import MEASURES

TABLE = json.loads((Path(__file__).parents[2] / "benchmarks" / "layer_counts.json").read_text())


def test_the_table_has_every_case():
    assert [(row["encoding"], row["measure"]) for row in TABLE["layers"]] == [
        (encoding, measure) for encoding in COUNTED for measure in MEASURES["attention"]
    ]


@pytest.mark.skipif(TABLE["torch"] != minor_version(), reason="another torch may split its operators otherwise")
@pytest.mark.parametrize("row", TABLE["layers"], ids=lambda row: f"{row['encoding']}, {row['measure']}")
def test_a_layer_does_the_work_of_the_table(row):
    """If a difference is meant, run `python benchmarks/layer_counts.py`."""
    assert count_layer(row["encoding"], row["measure"]) == row


def test_counts_are_those_on_paper():
    """Views and allocations are free; every other operator reads its arguments and writes its result."""
    a, b = torch.ones(4, 8), torch.ones(1, 8)
    with CountingMode() as counted:
        c = a.T.reshape(8, 4).view(8, 4)[:2]
        assert (counted.launches, counted.bytes) == (0, 0)
        a.add_(1.0)
        a + b.expand(4, 8)
        c @ a
    assert counted.launches == 3
    assert counted.bytes == 4 * (32 + (32 + 8 + 32) + (8 + 32 + 16))
