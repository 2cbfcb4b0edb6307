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
    script["set_warps"](None)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("warps", [1, 2, 4])
@pytest.mark.parametrize("device", DEVICES)
def test_programs_of_any_size_compute_the_same(device, warps, parts, set_warps, monkeypatch):
    from equitape.kernels import triton_backward, triton_field, triton_mixing

    monkeypatch.setattr("equitape.kernels.FEW_FREQUENCIES", 0)
    own = {module: module.WARPS for module in (triton_field, triton_mixing)}
    usual = triton_backward.PROGRAMS_PER_PROCESSOR, triton_mixing.BACKWARD_PROGRAMS
    set_warps(warps)
    assert {triton_field.WARPS, triton_mixing.WARPS} == {warps}
    assert triton_backward.PROGRAMS_PER_PROCESSOR * warps == usual[0] * own[triton_field]
    assert triton_mixing.BACKWARD_PROGRAMS * warps == usual[1] * own[triton_mixing]
    check(make_inputs(parts=parts, tokens=9), device, torch.bfloat16, normalize=parts == 2)
