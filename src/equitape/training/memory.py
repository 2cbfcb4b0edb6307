"""The most memory that training held: of the GPU, or of the process where there is none."""

from contextlib import suppress
from pathlib import Path

import torch

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"


def reset_peak() -> None:
    """Begin to count anew, where that is possible."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return
    # not Linux, or not allowed: the peak is then that of the whole process
    with suppress(OSError):
        CLEAR.write_text(RESET_PEAK)


def peak_mib() -> float | None:
    """MiB held at most since then; None where nobody counts."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    try:
        lines = STATUS.read_text().splitlines()
    except OSError:
        return None
    kibibytes = [int(line.split()[1]) for line in lines if line.startswith("VmHWM")]
    return kibibytes[0] / 1024 if kibibytes else None
