"""Several processes that meet as those of torchrun or `accelerate launch` do, for tests."""

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def run_processes(
    count: int, function: Callable[..., Any], *arguments: Any, sharded: bool = False, parts: int = 1
) -> None:
    """Call a function in several processes at once.

    sharded: with FSDP2, as an accelerate configuration asks for it; parts: processes that share each row.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        meeting = Path(folder) / "meeting"
        processes = [
            context.Process(target=_process, args=(rank, count, meeting, sharded, parts, function, arguments))
            for rank in range(count)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    assert [process.exitcode for process in processes] == [0] * count


def _process(
    rank: int,
    count: int,
    meeting: Path,
    sharded: bool,
    parts: int,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    """One process. They meet at a file: a free port may be taken again before they meet."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count), MASTER_ADDR="localhost", MASTER_PORT="1"
    )
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=count)
    AcceleratorState._reset_state(reset_partial_state=True)
    if parts > 1:
        os.environ.update(
            ACCELERATE_USE_PARALLELISM_CONFIG="true",
            PARALLELISM_CONFIG_CP_SIZE=str(parts),
            PARALLELISM_CONFIG_DP_SHARD_SIZE=str(count // parts),
        )
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
    function(*arguments)
    torch.distributed.destroy_process_group()
