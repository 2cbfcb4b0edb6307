"""Runs side by side: small models leave most of a GPU, and of a CPU's cores, idle, so several processes share them."""

import json
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Key = tuple[str, int]
"""Label and seed of a run."""
TAIL_BYTES = 4096


def side_by_side(
    make: Callable[..., dict[str, Any]],
    arguments: dict[Key, tuple[Any, ...]],
    jobs: int,
    logs: dict[Key, Path],
    steps: int | None,
    console: Console,
) -> Iterator[tuple[Key, dict[str, Any] | None]]:
    """Call `make` with the arguments of every run, in `jobs` processes; results as they come, None of a dead process.

    logs: where each run writes its steps, which a terminal shows.
    """
    jobs = min(jobs, len(arguments))
    pool = ProcessPoolExecutor(
        jobs, mp_context=get_context("spawn"), initializer=begin_worker, initargs=(torch.get_num_threads(), jobs)
    )
    columns = (
        TextColumn("{task.description:>20}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with pool, Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bars:
        futures = {pool.submit(make, *given): key for key, given in arguments.items()}
        shown = {key: bars.add_task(f"{escape(key[0])} {key[1]}", total=steps, visible=False) for key in arguments}
        running = set(futures)
        while running:
            done, running = wait(running, timeout=1.0, return_when=FIRST_COMPLETED)
            for future in running:
                if step := last_step(logs[futures[future]]):
                    bars.update(shown[futures[future]], completed=step, visible=True)
            for future in done:
                bars.update(shown[futures[future]], visible=False)
                try:
                    yield futures[future], future.result()
                except BrokenProcessPool:
                    yield futures[future], None


def begin_worker(threads: int, jobs: int) -> None:
    """Take a share of the threads, since more would only wait for each other, and end with the process that asked.

    However that one is killed: a run that went on alone would be in the way of the one that continues it.
    """
    torch.set_num_threads(max(1, threads // jobs))
    threading.Thread(target=end_with_parent, daemon=True).start()


def end_with_parent() -> None:
    """Wait for the parent process to end, then end this one as a kill would."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def last_step(log: Path) -> int:
    """The last step that a log has a whole line of; 0 for none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]
        return int(json.loads(lines[-1])["step"])
    except (OSError, ValueError, KeyError, IndexError):
        return 0
