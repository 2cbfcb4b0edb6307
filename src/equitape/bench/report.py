"""Rows of results: as a table for people, as JSON, as lines of a CSV file, and as a plot of time against length."""

import csv
import datetime
import importlib.metadata
import itertools
import json
import math
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from ..report.plots import numbered_style

OK, DISAGREES, OUT_OF_MEMORY, FAILED = "ok", "disagrees", "out of memory", "failed"
AGAIN = " (again)"
PEAK = "peak MiB"
PANELS_IN_A_ROW = 3
STEPS = (1.0, 2.0, 5.0)
PICTURES = (".png", ".pdf", ".svg", ".eps", ".jpg", ".jpeg", ".tif", ".tiff", ".webp")
"""Endings of files that a plot is written to."""


@dataclass(kw_only=True)
class Row:
    """One measurement with all it takes to know what was measured; the fields are the columns of the CSV file."""

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
    """Median over that of RoPE, measured first in the same run."""
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


COLUMNS = [field.name for field in fields(Row)]


def environment(device: torch.device) -> dict[str, str]:
    """The columns that say when, with what and on what."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": find_commit(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else f"none ({platform.machine()} CPU)",
        "torch": torch.__version__,
        "transformers": find_version("transformers"),
        "triton": find_version("triton"),
    }


def find_version(package: str) -> str:
    """The version of an installed package, or "none"."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def find_commit() -> str:
    """The commit this code is from, marked where files differ from it; "unknown" outside of its repository."""
    package = Path(__file__).parents[1]

    def git(*arguments: str) -> str | None:
        try:
            found = subprocess.run(["git", *arguments], cwd=package, capture_output=True, text=True, timeout=30)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return found.stdout.strip() if found.returncode == 0 else None

    # an installed copy may lie inside somebody else's repository
    if git("ls-files", "--error-unmatch", "version.py") is None:
        return "unknown"
    return git("describe", "--always", "--dirty", "--abbrev=12", "--exclude=*") or "unknown"


def drifts(rows: Sequence[Row]) -> dict[tuple[str, int, int], float]:
    """How much slower RoPE was the second time, for each group where it ran twice, as a fraction."""
    found = {}
    for row in rows:
        if row.encoding.endswith(AGAIN) and row.ratio is not None:
            found[row.group] = row.ratio - 1
    return found


def print_table(rows: Sequence[Row], console: Console) -> None:
    """A table for people for each group of rows, and how far RoPE drifted between its two turns."""
    first = rows[0]
    how = "compiled" if first.compile else "not compiled"
    console.print(f"{first.shape}, {first.dtype}, {how}, {first.gpu}, torch {first.torch}", highlight=False)
    drift = drifts(rows)
    # memory is measured on GPUs alone
    hidden = () if any(row.peak_mib is not None for row in rows) else (PEAK,)
    names = [name for name in _cells(first) if name not in hidden]
    for (workload, batch, length), group in itertools.groupby(rows, lambda row: row.group):
        title = f"{workload}, {batch} x {length}"
        if (workload, batch, length) in drift:
            title += f" (RoPE measured again: {drift[workload, batch, length]:+.1%})"
        table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
        for index, name in enumerate(names):
            table.add_column(name, justify="right" if index else "left")
        notes = []
        for row in group:
            cells = _cells(row)
            table.add_row(*(cells[name] for name in names))
            if row.note:
                notes.append(f"  {row.encoding}: {row.note}")
        console.print(table)
        for note in notes:
            console.print(note, highlight=False, markup=False)


def _cells(row: Row) -> dict[str, str]:
    """What the table says of a row, by column."""

    def number(value: float | None) -> str:
        return "" if value is None else format(value, ",.0f" if value >= 100 else ".3g")

    spread = ""
    if row.ms_median and row.ms_low and row.ms_high:
        spread = f"{row.ms_low / row.ms_median - 1:.0%} +{row.ms_high / row.ms_median - 1:.0%}"
    return {
        "encoding": row.encoding,
        "ms": row.status if row.ms_median is None else f"{row.ms_median:.3f}",
        "spread": spread,
        "to RoPE": "" if row.ratio is None else f"{row.ratio:.2f}",
        PEAK: number(row.peak_mib),
        "GFLOP": number(row.gflops),
        "M params": number(None if row.params is None else row.params / 1e6),
    }


def to_json(rows: Sequence[Row]) -> str:
    """All rows, and RoPE's drift, as JSON."""
    drift = [
        {"workload": workload, "batch": batch, "length": length, "drift": value}
        for (workload, batch, length), value in drifts(rows).items()
    ]
    return json.dumps({"rows": [asdict(row) for row in rows], "rope_drift": drift}, indent=2)


def check_csv(path: Path) -> None:
    """Refuse what cannot be appended to, and a file of other columns."""
    check_place(path)
    if path.exists() and path.stat().st_size:
        with path.open(newline="", errors="replace") as file:
            header = next(csv.reader([file.readline()]), [])
        if header != COLUMNS:
            raise ValueError(f"{str(path)!r} has other columns than this benchmark writes; name a new file.")


def check_plot(path: Path) -> None:
    """Refuse a picture that could not be written once all is measured."""
    check_place(path)
    if path.suffix.lower() not in PICTURES:
        raise ValueError(f"{str(path)!r} is no name of a picture; its ending must be one of {', '.join(PICTURES)}.")


def check_place(path: Path) -> None:
    """Refuse a path that no file can be written to."""
    if path.is_dir():
        raise ValueError(f"{str(path)!r} is a folder; give the name of a file.")
    if not path.parent.is_dir():
        raise ValueError(f"{str(path)!r} cannot be written: there is no folder {str(path.parent)!r}; make it first.")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{str(path)!r} cannot be written to; name another file.")


def append_csv(path: Path, row: Row) -> None:
    """Add a line to a CSV file, which is begun with its header."""
    fresh = not path.exists() or not path.stat().st_size
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if fresh:
            writer.writeheader()
        writer.writerow(asdict(row))


def plot(rows: Sequence[Row], path: Path) -> None:
    """Write the picture of `draw`."""
    draw(rows).savefig(path, dpi=150)


def draw(rows: Sequence[Row]) -> Any:
    """Time against length, both logarithmic, one panel for each workload; readable in greyscale."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    timed = [row for row in rows if row.ms_median is not None and not row.encoding.endswith(AGAIN)]
    workloads = list(dict.fromkeys(row.workload for row in timed))
    several = len({row.batch for row in timed}) > 1
    encodings = list(dict.fromkeys(row.encoding for row in timed))
    columns = min(max(len(workloads), 1), PANELS_IN_A_ROW)
    lines_of_panels = max(math.ceil(len(workloads) / columns), 1)
    figure = Figure(figsize=(5 * columns, 4.2 * lines_of_panels), layout="constrained")
    for index, workload in enumerate(workloads):
        axes = figure.add_subplot(lines_of_panels, columns, index + 1)
        here = [row for row in timed if row.workload == workload]
        lines: dict[tuple[str, int], list[Row]] = {}
        for row in here:
            lines.setdefault((row.encoding, row.batch), []).append(row)
        for (encoding, batch), line in lines.items():
            line.sort(key=lambda row: row.length)
            axes.plot(
                [row.length for row in line],
                [row.ms_median or 0.0 for row in line],
                **numbered_style(encodings.index(encoding), f"{encoding}, batch {batch}" if several else encoding),
            )
        lengths = sorted({row.length for row in here})
        axes.set(xscale="log", yscale="log", title=workload, ylabel="milliseconds")
        axes.set_xlabel("tokens attended to" if workload == "decode" else "tokens in a sequence")
        axes.set_xticks(lengths, [str(length) for length in lengths])
        if len(lengths) == 1:
            axes.set_xlim(lengths[0] / 2, lengths[0] * 2)
        axes.minorticks_off()
        axes.set_ylim(round_limits([row.ms_median or math.nan for row in here]))
        axes.yaxis.set_major_locator(LogLocator(subs=STEPS))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    if timed:
        how = "compiled" if timed[0].compile else "not compiled"
        size = "" if several else f", batch {timed[0].batch}"
        figure.suptitle(f"{timed[0].shape}, {timed[0].dtype}, {how}{size}, {timed[0].gpu}", fontsize="medium")
    return figure


def round_limits(values: Sequence[float]) -> tuple[float, float]:
    """The nearest of 1, 2, 5, 10, 20 and so on below and above all values: however close these are, two ticks show."""
    powers = range(math.floor(math.log10(min(values))) - 1, math.ceil(math.log10(max(values))) + 2)
    steps = [step * 10.0**power for power in powers for step in STEPS]
    return max(step for step in steps if step < min(values)), min(step for step in steps if step > max(values))
