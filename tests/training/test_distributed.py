"""Two processes train as one does."""

import os
import shutil
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from tiny import losses, read_lines, run
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from equitape.training import checkpoints
from processes import run_processes

OPTIONS = {"dropout": 0.0, "steps": 12}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("alone") / "run"
    run(run_dir, gradient_accumulation_steps=2, **OPTIONS)
    return run_dir


def launch(function) -> None:
    """What `torchrun --standalone --nproc-per-node 2` does, with processes that need not import anything again."""
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=2, rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=0,
        start_method="fork",
    )  # fmt: skip
    elastic_launch(config, start_anew)(function)


def start_anew(function) -> None:
    """One process of the launcher, which has set the environment. It forgets that its parent was alone."""
    AcceleratorState._reset_state(reset_partial_state=True)
    torch.set_num_threads(1)
    function()


def test_torchrun_gives_the_losses_of_one_process(alone, tmp_path):
    """Both see different numbers of labels at every step, which a mean of means would get wrong."""
    # the launcher changes how its process handles signals
    launcher = get_context("fork").Process(target=launch, args=(partial(run, tmp_path, eval_steps=7, **OPTIONS),))
    launcher.start()
    launcher.join()
    assert launcher.exitcode == 0
    lines, expected = read_lines(tmp_path), read_lines(alone)
    assert [line.pop("evaluation") for line in lines if "evaluation" in line]
    assert losses(tmp_path) == pytest.approx(losses(alone), rel=1e-5)
    assert lines[-1]["tokens"] == expected[-1]["tokens"]
    assert (tmp_path / "checkpoints" / "checkpoint-12" / "rng_state_1.pth").exists()


def run_two(run_dir: Path, sharded: bool, **options) -> None:
    run_processes(2, partial(run, run_dir, **options), sharded=sharded)


@pytest.mark.parametrize("sharded", [False, True], ids=["replicated", "sharded"])
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_two_processes_resume(sharded, alone, tmp_path):
    """Replicated (DDP) or sharded (FSDP2), on one machine as on two."""
    run_two(tmp_path, sharded, **OPTIONS)
    assert losses(tmp_path) == pytest.approx(losses(alone), rel=1e-5)
    log = (tmp_path / "log.jsonl").read_bytes()
    shutil.rmtree(tmp_path / "checkpoints" / "checkpoint-12")
    assert checkpoints.step_of(checkpoints.newest(tmp_path)) == 10
    run_two(tmp_path, sharded, resume=True, **OPTIONS)
    assert (tmp_path / "log.jsonl").read_bytes() == log


@pytest.mark.skipif(not os.environ.get("EQUITAPE_LONG_TESTS"), reason="starts four processes")
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_four_shards_continue_what_two_began(alone, tmp_path):
    run_two(tmp_path, True, **OPTIONS)
    shutil.rmtree(tmp_path / "checkpoints" / "checkpoint-12")
    run_processes(4, partial(run, tmp_path, resume=True, **OPTIONS), sharded=True)
    assert losses(tmp_path) == pytest.approx(losses(alone), rel=1e-5)


def test_batch_that_cannot_be_split_is_refused(tmp_path, monkeypatch):
    from accelerate import PartialState

    monkeypatch.setattr(PartialState(), "num_processes", 3)
    with pytest.raises(ValueError, match="batch_size 8 cannot be split over 3 processes and 2 micro-batches"):
        run(tmp_path, gradient_accumulation_steps=2)
    with pytest.raises(ValueError, match="a budget in minutes needs a single process"):
        run(tmp_path, batch_size=9, steps=None, minutes=1.0)
