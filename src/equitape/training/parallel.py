"""Parallel runs: one small model leaves most of a GPU or CPU idle, so several processes share it."""

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any

import torch

from ..runs.progress import Phase, Progress
from ..runs.results import RunResult

Key = tuple[str, int]
"""Label and seed of a run."""
TAIL_BYTES = 4096


def side_by_side(
    make: Callable[..., RunResult],
    arguments: dict[Key, tuple[Any, ...]],
    jobs: int,
    logs: dict[Key, Path],
    steps: int | None,
    progress: Progress,
) -> Iterator[tuple[Key, RunResult | None]]:
    """Call `make` with the arguments of every run, in `jobs` processes. Yields results as they finish, None for a
    process that died.

    logs: the log file of each run, for the progress display.
    """
    jobs = min(jobs, len(arguments))
    pool = ProcessPoolExecutor(
        jobs, mp_context=get_context("spawn"), initializer=begin_worker, initargs=(torch.get_num_threads(), jobs)
    )
    with pool, ExitStack() as shown:
        try:
            futures = {pool.submit(make, *given): key for key, given in arguments.items()}
            phases: dict[Key, tuple[ExitStack, Phase]] = {}
            running = set(futures)
            while running:
                done, running = wait(running, timeout=1.0, return_when=FIRST_COMPLETED)
                for key in (futures[future] for future in running):
                    if step := last_step(logs[key]):
                        if key not in phases:
                            stack = shown.enter_context(ExitStack())
                            name = f"training {key[0]}, seed {key[1]}"
                            phase = progress.phase(name, steps, done=step, unit="step", main=True)
                            phases[key] = stack, stack.enter_context(phase)
                        phases[key][1].update(step)
                for future in done:
                    key = futures[future]
                    if key in phases:
                        phases[key][0].close()
                    try:
                        yield key, future.result()
                    except BrokenProcessPool:
                        yield key, None
        except BaseException:
            # do not wait for the pool's runs; they resume from their checkpoints next time
            for process in list((pool._processes or {}).values()):
                process.kill()
            raise


def begin_worker(threads: int, jobs: int) -> None:
    """Use a share of the threads, leave Ctrl-C to the parent process, and exit when it dies.

    An orphaned run would hold the lock of its folder.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(max(1, threads // jobs))
    threading.Thread(target=end_with_parent, daemon=True).start()


def end_with_parent() -> None:
    """Wait for the parent process to end, then exit at once."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def last_step(log: Path) -> int:
    """The last step with a complete line in a log, or 0."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]
        return int(json.loads(lines[-1])["step"])
    except (OSError, ValueError, KeyError, IndexError):
        return 0
