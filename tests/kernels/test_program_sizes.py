"""The benchmark of the update times programs of several sizes: each computes the same."""

import runpy
from pathlib import Path

import pytest
import torch
from devices import DEVICES, needs_triton
from fields import check, make_inputs

pytestmark = needs_triton
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "field_update.py"


@pytest.fixture
def set_warps():
    script = runpy.run_path(str(SCRIPT))
    yield script["set_warps"]
    script["set_warps"](script["USUAL"][0])


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("warps", [1, 2])
@pytest.mark.parametrize("device", DEVICES)
def test_programs_of_any_size_compute_the_same(device, warps, parts, set_warps, monkeypatch):
    from equitape.kernels import triton_field, triton_mixing

    monkeypatch.setattr("equitape.kernels.FEW_FREQUENCIES", 0)
    field = torch.empty(1, 1, 8, 16)
    tiles, programs = triton_field.num_tiles(field), triton_mixing.BACKWARD_PROGRAMS
    set_warps(warps)
    more = triton_field.WARPS, triton_field.num_tiles(field) // tiles, triton_mixing.BACKWARD_PROGRAMS // programs
    assert more == (warps, 4 // warps, 4 // warps)
    check(make_inputs(parts=parts, tokens=9), device, torch.bfloat16, normalize=parts == 2)
