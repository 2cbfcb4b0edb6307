"""Two processes train as one does."""

import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from tiny import losses, read_lines, run

from equitape.training import checkpoints

OPTIONS = {"dropout": 0.0, "steps": 12}


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return str(probe.getsockname()[1])


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("alone") / "run"
    run(run_dir, gradient_accumulation_steps=2, **OPTIONS)
    return run_dir


def test_torchrun_gives_the_losses_of_one_process(alone, tmp_path):
    """Both see different numbers of labels at every step, which a mean of means would get wrong."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={free_port()}"]
    command += [str(Path(__file__).parent / "tiny.py"), str(tmp_path), "dropout=0.0", "steps=12", "eval_steps=7"]
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    lines, expected = read_lines(tmp_path), read_lines(alone)
    assert [line.pop("evaluation") for line in lines if "evaluation" in line]
    assert losses(tmp_path) == pytest.approx(losses(alone), rel=1e-5)
    assert lines[-1]["tokens"] == expected[-1]["tokens"]
    assert (tmp_path / "checkpoints" / "checkpoint-12" / "rng_state_1.pth").exists()


def process(rank: int, meeting: Path, sharded: bool, run_dir: Path, options: dict) -> None:
    """One of two processes, told what torchrun or `accelerate launch` tells them, but that they meet at a file.

    A free port may be taken again before they meet.
    """
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="1")
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    AcceleratorState._reset_state(reset_partial_state=True)
    if sharded:
        os.environ.update(
            ACCELERATE_USE_FSDP="true",
            FSDP_VERSION="2",
            FSDP_AUTO_WRAP_POLICY="TRANSFORMER_BASED_WRAP",
            FSDP_STATE_DICT_TYPE="FULL_STATE_DICT",
            FSDP_RESHARD_AFTER_FORWARD="true",
        )
        # accelerate shards on accelerators only and quietly replicates on the CPU: call the CPU one
        PartialState._prepare_backend = lambda self, *args, **kwargs: ("gloo", DistributedType.MULTI_GPU)
        PartialState.set_device = lambda self: setattr(self, "device", torch.device("cpu"))
        import equitape.training.trainer as trainer

        step = trainer.EquitapeTrainer.training_step

        def checked(self, model, *args):
            assert all(type(parameter).__name__ == "DTensor" for parameter in model.parameters())
            return step(self, model, *args)

        trainer.EquitapeTrainer.training_step = checked
    run(run_dir, **options)
    torch.distributed.destroy_process_group()


def run_two(run_dir: Path, sharded: bool, **options) -> None:
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(rank, Path(folder) / "meeting", sharded, run_dir, options) for rank in range(2)]
        processes = [context.Process(target=process, args=given) for given in arguments]
        for one in processes:
            one.start()
        for one in processes:
            one.join()
    assert [one.exitcode for one in processes] == [0, 0]


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


def test_batch_that_cannot_be_split_is_refused(tmp_path, monkeypatch):
    from accelerate import PartialState

    monkeypatch.setattr(PartialState(), "num_processes", 3)
    with pytest.raises(ValueError, match="batch_size 8 cannot be split over 3 processes and 2 micro-batches"):
        run(tmp_path, gradient_accumulation_steps=2)
    with pytest.raises(ValueError, match="a budget in minutes needs a single process"):
        run(tmp_path, batch_size=9, steps=None, minutes=1.0)
