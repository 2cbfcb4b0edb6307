"""Peak memory: of the GPU, or of the process where there is no GPU."""

from contextlib import suppress
from pathlib import Path

import torch

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"


def reset_peak() -> None:
    """Start counting again, where the system allows it."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return
    # elsewhere than on Linux, or without permission, the peak is that of the whole process
    with suppress(OSError):
        CLEAR.write_text(RESET_PEAK)


def peak_mib() -> float | None:
    """Peak MiB since then; None where the system does not count."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    try:
        lines = STATUS.read_text().splitlines()
    except OSError:
        return None
    kibibytes = [int(line.split()[1]) for line in lines if line.startswith("VmHWM")]
    return kibibytes[0] / 1024 if kibibytes else None
