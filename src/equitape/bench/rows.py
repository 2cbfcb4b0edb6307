"""Benchmark results as rows, in JSON and CSV. report/benchmark.py shows them as a table and a plot."""

import csv
import datetime
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import torch

from ..runs.environment import find_commit, package_version

OK, DISAGREES, OUT_OF_MEMORY, FAILED = "ok", "disagrees", "out of memory", "failed"
AGAIN = " (again)"
PICTURES = (".png", ".pdf", ".svg", ".eps", ".jpg", ".jpeg", ".tif", ".tiff", ".webp")
"""File extensions for plots."""
UNSTEADY = 0.5
"""Times are steady if the 10th to 90th percentiles span at most this fraction of the median."""


@dataclass(kw_only=True)
class Row:
    """One measurement with its settings; the fields are the CSV columns."""

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
    """The median divided by RoPE's median, measured first in the same run."""
    peak_mib: float | None = None
    params: int | None = None
    gflops: float | None = None
    gmacs: float | None = None
    status: str = OK
    note: str = ""

    @property
    def group(self) -> tuple[str, int, int]:
        """Rows with equal groups are compared."""
        return self.workload, self.batch, self.length

    @property
    def spread(self) -> tuple[float, float] | None:
        """The 10th and 90th percentiles as fractions of the median, below and above it."""
        if not (self.ms_median and self.ms_low and self.ms_high):
            return None
        return self.ms_low / self.ms_median - 1, self.ms_high / self.ms_median - 1

    @property
    def unsteady(self) -> bool:
        """Whether times vary too much for the median to be meaningful."""
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
    """How much slower RoPE's second measurement was, as a fraction, for each group with two."""
    return {row.group: row.ratio - 1 for row in rows if row.encoding.endswith(AGAIN) and row.ratio is not None}


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
    """Raise ValueError for a file that is not writable or has other columns."""
    check_place(path)
    if path.exists() and path.stat().st_size:
        with path.open(newline="", errors="replace") as file:
            header = next(csv.reader([file.readline()]), [])
        if header != COLUMNS:
            raise ValueError(f"{str(path)!r} has different columns from this benchmark; choose a new file.")


def check_plot(path: Path) -> None:
    """Raise ValueError for an unwritable plot file before anything is measured."""
    check_place(path)
    if path.suffix.lower() not in PICTURES:
        raise ValueError(f"Cannot write a plot to {str(path)!r}; the name must end in one of {', '.join(PICTURES)}.")


def check_place(path: Path) -> None:
    """Raise ValueError for a path that is not writable."""
    if path.is_dir():
        raise ValueError(f"{str(path)!r} is a folder; give a file name.")
    if not path.parent.is_dir():
        raise ValueError(
            f"Cannot write {str(path)!r}: the folder {str(path.parent)!r} does not exist; create it first."
        )
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"Cannot write to {str(path)!r}; choose another file.")


def read_csv(path: Path) -> list[Row]:
    """The rows of a CSV file of this benchmark."""
    if not path.is_file():
        raise ValueError(f"There is no file {str(path)!r}; give a CSV file that `equitape bench --csv` wrote.")
    check_csv(path)
    hints = get_type_hints(Row)
    with path.open(newline="") as file:
        rows = [
            Row(**{name: _typed(text, hints[name]) for name, text in line.items()}) for line in csv.DictReader(file)
        ]
    if not rows:
        raise ValueError(f"{str(path)!r} has no measurements.")
    return rows


def _typed(text: str, hint: Any) -> Any:
    """A cell as its column's type; an empty one is None, or empty text."""
    if hint is str:
        return text
    if hint is bool:
        return text == "True"
    kind = next(kind for kind in get_args(hint) or (hint,) if kind is not type(None))
    return kind(text) if text else None


def append_csv(path: Path, row: Row) -> None:
    """Append a line to a CSV file; write the header to a new file."""
    fresh = not path.exists() or not path.stat().st_size
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if fresh:
            writer.writeheader()
        writer.writerow(asdict(row))
