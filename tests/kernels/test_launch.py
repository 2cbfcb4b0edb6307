"""A kernel is looked up once for each layout of its tensors."""

import pytest
import torch

from equitape.kernels import launch as module
from equitape.kernels.launch import Launch, launch


class Recorded:
    """Stands in for a Triton kernel: compiles to itself, and records how it was run."""

    arg_names = ["x", "y", "count", "WIDTH", "SCALE"]

    def __init__(self, compiles=True):
        self.compiles = compiles
        self.bound, self.repeated = [], []

    def __getitem__(self, grid):
        def run(*arguments, **constants):
            self.bound.append((grid, arguments, constants))
            return Compiled(self) if self.compiles else None

        return run


class Compiled:
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *arguments: self.kernel.repeated.append((grid, arguments))


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch):
    monkeypatch.setattr(module, "_kept", {})


def plan():
    # in another order than the kernel's own
    return Launch((7,), (5,), {"num_warps": 4, "SCALE": 0.5, "WIDTH": 16})


def test_the_second_launch_passes_all_arguments_in_the_order_of_the_kernel():
    kernel, x, y = Recorded(), torch.zeros(4, 4), torch.zeros(2)
    launch(kernel, (x, None), False, plan)
    launch(kernel, (y.new_zeros(4, 4), None), False, plan)
    assert len(kernel.bound) == 1
    [(grid, arguments)] = kernel.repeated
    assert grid == (7, 1, 1)
    assert arguments[1:] == (None, 5, 16, 0.5)


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(4, 4).t(),
        torch.zeros(4, 5),
        torch.zeros(4, 4, dtype=torch.float64),
        torch.zeros(17)[1:].view(4, 4),
        None,
    ],
    ids=["strides", "shape", "dtype", "alignment", "absent"],
)
def test_another_layout_is_another_launch(other):
    kernel = Recorded()
    launch(kernel, (torch.zeros(4, 4), torch.zeros(1)), False, plan)
    launch(kernel, (other, torch.zeros(1)), False, plan)
    assert len(kernel.bound) == 2


def test_other_options_are_another_launch():
    kernel, tensors = Recorded(), (torch.zeros(4, 4), torch.zeros(1))
    launch(kernel, tensors, False, plan)
    launch(kernel, tensors, True, plan)
    assert len(kernel.bound) == 2


def test_the_interpreter_is_called_every_time():
    kernel, tensors = Recorded(compiles=False), (torch.zeros(4, 4), torch.zeros(1))
    for _ in range(3):
        launch(kernel, tensors, False, plan)
    assert len(kernel.bound) == 3


def test_what_is_kept_is_bounded(monkeypatch):
    monkeypatch.setattr(module, "MAX_KEPT", 3)
    kernel = Recorded()
    for length in range(1, 20):
        launch(kernel, (torch.zeros(length), None), False, plan)
        assert len(module._kept) <= 3
