"""Time, memory and operations of a path."""

import gc
import statistics
import time
from dataclasses import dataclass, replace

import torch
from torch.utils.flop_counter import FlopCounterMode

from .shapes import PAPER
from .workloads import Case, Path, Variant, build

SLEEP_CYCLES = 4_000_000


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Milliseconds of the runs in their order, and the most memory allocated at any time in them (CUDA only)."""

    milliseconds: list[float]
    peak_mib: float | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.milliseconds)

    @property
    def spread(self) -> tuple[float, float]:
        """The tenth and the ninetieth percentile."""
        if len(self.milliseconds) == 1:
            return self.milliseconds[0], self.milliseconds[0]
        tenths = statistics.quantiles(self.milliseconds, n=10, method="inclusive")
        return tenths[0], tenths[-1]


def time_path(path: Path, case: Case, runs: int, warm_up: int) -> Timing:
    """Warm up, then time `runs` runs one by one, each on the next set of inputs."""
    on_cuda = case.device.type == "cuda"
    for index in range(warm_up):
        path.before(index % case.input_sets)
        path.call(index % case.input_sets)
    if on_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    run = _cuda_run if on_cuda else _host_run
    times = [run(path, index % case.input_sets) for index in range(runs)]
    peak = torch.cuda.max_memory_allocated() / 2**20 if on_cuda else None
    return Timing(milliseconds=times, peak_mib=peak)


def _host_run(path: Path, index: int) -> float:
    path.before(index)
    begin = time.perf_counter()
    path.call(index)
    return 1e3 * (time.perf_counter() - begin)


def _cuda_run(path: Path, index: int) -> float:
    path.before(index)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    if path.is_part:
        # keeps the device busy while the host prepares the launches, as the layers before would in a model
        torch.cuda._sleep(SLEEP_CYCLES)
    begin.record()
    path.call(index)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def count_operations(case: Case) -> int:
    """Floating-point operations of one run by torch's counter, matrix products alone, causality not taken off.

    Counted on tensors without data, attention and our kernels written out: the counter cannot look into fused ones.
    """
    nowhere = replace(case, device=torch.device("meta"), input_sets=1)
    # without data even torch's own attention is written out; "eager" would be our layout
    path = build(nowhere, Variant(attention="sdpa" if case.encoding == PAPER else "eager", dtype=case.dtype))
    path.before(0)
    with FlopCounterMode(display=False) as counter:
        path.call(0)
    return counter.get_total_flops()


def free_memory() -> None:
    """Forget compiled code and give memory back, so that one encoding leaves nothing behind for the next."""
    gc.collect()
    torch._dynamo.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error, or one it stems from, says that memory ran out."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, torch.OutOfMemoryError | MemoryError):
            return True
        # compilers wrap the error into one of their own, and the CPU has none
        if any(words in str(found) for words in ("CUDA out of memory", "can't allocate memory", "CUDA error: out of")):
            return True
        found = found.__cause__ or found.__context__
    return False
