"""Results of the benchmark as rows, in JSON and in a CSV file. report/benchmark.py shows them as a table and a plot."""

import csv
import datetime
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch

from ..runs.environment import find_commit, package_version

OK, DISAGREES, OUT_OF_MEMORY, FAILED = "ok", "disagrees", "out of memory", "failed"
AGAIN = " (again)"
PICTURES = (".png", ".pdf", ".svg", ".eps", ".jpg", ".jpeg", ".tif", ".tiff", ".webp")
"""Endings of files that a plot can be written to."""
UNSTEADY = 0.5
"""From the tenth to the ninetieth percentile, times may differ by this share of their median."""


@dataclass(kw_only=True)
class Row:
    """One measurement and everything that identifies it; the fields are the columns of the CSV file."""

    date: str
    commit: str
    gpu: str
    torch: str
    transformers: str
    triton: str
    dtype: str
    compile: bool
    shape: str
    workload: str
    encoding: str
    batch: int
    length: int
    ms_median: float | None = None
    ms_low: float | None = None
    ms_high: float | None = None
    ratio: float | None = None
    """The median divided by RoPE's, which is measured first in the same run."""
    peak_mib: float | None = None
    params: int | None = None
    gflops: float | None = None
    gmacs: float | None = None
    status: str = OK
    note: str = ""

    @property
    def group(self) -> tuple[str, int, int]:
        """Rows of one group are compared with each other."""
        return self.workload, self.batch, self.length

    @property
    def spread(self) -> tuple[float, float] | None:
        """The tenth and the ninetieth percentile as shares of the median, below and above it."""
        if not (self.ms_median and self.ms_low and self.ms_high):
            return None
        return self.ms_low / self.ms_median - 1, self.ms_high / self.ms_median - 1

    @property
    def unsteady(self) -> bool:
        """Whether the times spread so much that the median says little."""
        return self.spread is not None and self.spread[1] - self.spread[0] > UNSTEADY


COLUMNS = [field.name for field in fields(Row)]


def environment(device: torch.device) -> dict[str, str]:
    """The columns for date, versions and hardware."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": find_commit() or "unknown",
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else f"none ({platform.machine()} CPU)",
        "torch": torch.__version__,
        "transformers": package_version("transformers") or "none",
        "triton": package_version("triton") or "none",
    }


def drifts(rows: Sequence[Row]) -> dict[tuple[str, int, int], float]:
    """How much slower RoPE was the second time, for each group where it ran twice, as a fraction."""
    found = {}
    for row in rows:
        if row.encoding.endswith(AGAIN) and row.ratio is not None:
            found[row.group] = row.ratio - 1
    return found


def to_json(rows: Sequence[Row]) -> str:
    """All rows, whether each is unsteady, and RoPE's drift, as JSON."""
    drift = [
        {"workload": workload, "batch": batch, "length": length, "drift": value}
        for (workload, batch, length), value in drifts(rows).items()
    ]
    return json.dumps(
        {"rows": [{**asdict(row), "unsteady": row.unsteady} for row in rows], "rope_drift": drift}, indent=2
    )


def check_csv(path: Path) -> None:
    """Refuse a file that cannot be written or has other columns."""
    check_place(path)
    if path.exists() and path.stat().st_size:
        with path.open(newline="", errors="replace") as file:
            header = next(csv.reader([file.readline()]), [])
        if header != COLUMNS:
            raise ValueError(f"{str(path)!r} has other columns than this benchmark writes; name a new file.")


def check_plot(path: Path) -> None:
    """Refuse a plot that could not be written, before anything is measured."""
    check_place(path)
    if path.suffix.lower() not in PICTURES:
        raise ValueError(f"Cannot write a plot to {str(path)!r}; its name must end in one of {', '.join(PICTURES)}.")


def check_place(path: Path) -> None:
    """Refuse a path where no file can be written."""
    if path.is_dir():
        raise ValueError(f"{str(path)!r} is a folder; give the name of a file.")
    if not path.parent.is_dir():
        raise ValueError(
            f"{str(path)!r} cannot be written: the folder {str(path.parent)!r} does not exist; create it first."
        )
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{str(path)!r} cannot be written to; name another file.")


def append_csv(path: Path, row: Row) -> None:
    """Add a line to a CSV file; a new file gets its header first."""
    fresh = not path.exists() or not path.stat().st_size
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if fresh:
            writer.writeheader()
        writer.writerow(asdict(row))
