"""Which kernels take the time of a benchmark or of a training run?

    python benchmarks/kernel_times.py bench --shape 155m --batch 16 --workload train --encoding rope --encoding tape2
    python benchmarks/kernel_times.py train beyond-addition --encoding "tape2, jumps" --out runs/profiled

Runs an `equitape` command, records some of its steps with torch's profiler and prints, per step, the time on the clock,
the time in which the device works, and the kernels by their time. A device that works much less than the clock says
waits for the host. `bench` prints this for every case before it times it; `train` prints it and stops.
--kernels: how many to show; --steps: how many to record. Without a GPU it shows operators and their time on the CPU.
"""

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

SKIPPED = 20
"""Steps of a training run that are not recorded: they compile and fill caches."""
NAME_WIDTH = 110


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Recording:
    """Kernels of some steps, between `start` and `stop`."""

    def __init__(self) -> None:
        on_cuda = torch.cuda.is_available()
        self.profile = profile(activities=[ProfilerActivity.CUDA if on_cuda else ProfilerActivity.CPU])
        self.seconds = 0.0

    def start(self) -> None:
        synchronize()
        self.profile.start()
        self.seconds = -time.perf_counter()

    def stop(self) -> None:
        synchronize()
        self.seconds += time.perf_counter()
        self.profile.stop()

    def show(self, title: str, steps: int, kernels: int) -> None:
        """Print milliseconds of one step, then microseconds and launches of its kernels."""
        spent: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
        on_cuda = torch.cuda.is_available()
        for event in self.profile.key_averages():
            took = event.self_device_time_total if on_cuda else event.self_cpu_time_total
            if took:
                spent[event.key][0] += took / steps
                spent[event.key][1] += event.count / steps
        busy = sum(took for took, _ in spent.values())
        launches = sum(count for _, count in spent.values())
        wall = 1e3 * self.seconds / steps
        print(f"== {title}: {wall:.3f} ms on the clock, {busy / 1e3:.3f} ms in {launches:.0f} kernels")
        for name, (took, count) in sorted(spent.items(), key=lambda item: -item[1][0])[:kernels]:
            print(f"{took:10.1f} us {count:6.1f} x  {name[:NAME_WIDTH]}")


def watch_bench(steps: int, kernels: int) -> None:
    """Let `equitape bench` show the kernels of every case before it is timed."""
    from equitape.bench import run

    time_run = run.time_run

    def timed(prepared: Any, case: Any, *settings: Any) -> Any:
        def step(index: int) -> None:
            prepared.before(index % case.input_sets)
            prepared.call(index % case.input_sets)

        for index in range(3):
            step(index)
        recording = Recording()
        recording.start()
        for index in range(steps):
            step(index)
        recording.stop()
        options = " ".join(f"{name}={value}" for name, value in case.subject.options.items())
        title = f"{case.shape.name} {case.measure} {case.batch} x {case.length}, {case.subject.kind} {options}".strip()
        recording.show(title, steps, kernels)
        return time_run(prepared, case, *settings)

    run.time_run = timed


def watch_training(steps: int, kernels: int) -> None:
    """Let a training run show the kernels of some steps and stop."""
    from equitape.training.trainer import EquitapeTrainer

    training_step: Callable[..., Any] = EquitapeTrainer.training_step
    recording, count = Recording(), 0

    def step(self: Any, *inputs: Any, **options: Any) -> Any:
        nonlocal count
        if count == SKIPPED:
            recording.start()
        if count == SKIPPED + steps:
            recording.stop()
            recording.show("training step", steps, kernels)
            sys.exit()
        count += 1
        return training_step(self, *inputs, **options)

    EquitapeTrainer.training_step = step


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--kernels", type=int, default=25)
    parser.add_argument("command", choices=["bench", "train"])
    given, options = parser.parse_known_args()
    {"bench": watch_bench, "train": watch_training}[given.command](given.steps, given.kernels)
    from equitape.cli import app

    app([given.command, *options])


if __name__ == "__main__":
    main()
