"""Time, memory and operations of a prepared case."""

import gc
import statistics
import time
from dataclasses import dataclass, replace

import torch
from torch.utils.flop_counter import FlopCounterMode

from .subjects import FLA, PAPER
from .workloads import Case, PreparedRun, Variant, build

SLEEP_CYCLES = 20_000_000
"""About 10 ms: longer than hosts take to launch one layer with its backward pass."""
FEWEST = 3
"""Timed runs of a measurement that is out of time."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Milliseconds of each run in order, and peak allocated memory (CUDA only)."""

    milliseconds: list[float]
    peak_mib: float | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.milliseconds)

    @property
    def spread(self) -> tuple[float, float]:
        """The 10th and 90th percentiles."""
        if len(self.milliseconds) == 1:
            return self.milliseconds[0], self.milliseconds[0]
        tenths = statistics.quantiles(self.milliseconds, n=10, method="inclusive")
        return tenths[0], tenths[-1]


def time_run(prepared: PreparedRun, case: Case, runs: int, warm_up: int, seconds: float | None = None) -> Timing:
    """Warm up, then time `runs` runs, each on the next set of inputs.

    seconds: no run begins later than this after the first, except for the first FEWEST.
    """
    on_cuda = case.device.type == "cuda"
    begin = time.perf_counter()
    for index in range(warm_up):
        prepared.before(index % case.input_sets)
        prepared.call(index % case.input_sets)
        if seconds is not None:
            if on_cuda:
                torch.cuda.synchronize()
            if time.perf_counter() - begin > seconds / 2:
                break
    if on_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    run = _cuda_run if on_cuda else _host_run
    times: list[float] = []
    while len(times) < runs:
        times.append(run(prepared, len(times) % case.input_sets))
        if seconds is not None and len(times) >= FEWEST and time.perf_counter() - begin > seconds:
            break
    peak = torch.cuda.max_memory_allocated() / 2**20 if on_cuda else None
    return Timing(milliseconds=times, peak_mib=peak)


def _host_run(prepared: PreparedRun, index: int) -> float:
    prepared.before(index)
    begin = time.perf_counter()
    prepared.call(index)
    return 1e3 * (time.perf_counter() - begin)


def _cuda_run(prepared: PreparedRun, index: int) -> float:
    prepared.before(index)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    if prepared.is_part:
        # keep the device busy while the host queues launches, as earlier layers would in a model
        torch.cuda._sleep(SLEEP_CYCLES)
    begin.record()
    prepared.call(index)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def count_operations(case: Case) -> int | None:
    """Floating-point operations of one run by torch's counter: matrix products only, without savings by causality.

    Counted on the meta device with unfused attention and kernels, since the counter cannot see inside fused ones.
    None for layers of flash-linear-attention, which exist only as kernels.
    """
    if case.subject.kind in FLA:
        return None
    nowhere = replace(case, device=torch.device("meta"), input_sets=1)
    # on the meta device, torch's own attention is unfused too; "eager" would be our layout. transformers' Llama, which
    # cannot run there, has the products of our RoPE
    prepared = build(nowhere, Variant(attention="sdpa" if case.subject.kind == PAPER else "eager", dtype=case.dtype))
    prepared.before(0)
    with FlopCounterMode(display=False) as counter:
        prepared.call(0)
    return counter.get_total_flops()


def free_memory() -> None:
    """Drop compiled code and free memory, so that encodings do not affect each other."""
    gc.collect()
    torch._dynamo.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
