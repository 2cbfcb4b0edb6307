"""Benchmark results as terminal tables, as a Markdown table by length and as plots against length."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table as TerminalTable

from ..bench.rows import AGAIN, UNSTEADY, Row, drifts
from .charts import Line, LinePanel, line_figure
from .numbers import number
from .style import series_styles
from .tables import Table, cells, markdown_table

PEAK = "peak MiB"
MARK = " !"
"""Appended to the figures of unsteady measurements."""


def print_table(rows: Sequence[Row], console: Console) -> None:
    """Print one table per group, with the drift between the two RoPE measurements and a warning if times vary much."""
    first = rows[0]
    how = "compiled" if first.compile else "not compiled"
    console.print(
        f"{first.shape}, {first.dtype}, {how}, {first.gpu}, torch {first.torch}", highlight=False, markup=False
    )
    drift = drifts(rows)
    # memory is measured on GPUs only
    hidden = () if any(row.peak_mib is not None for row in rows) else (PEAK,)
    names = [name for name in cells_of(first) if name not in hidden]
    for (workload, batch, length), group in itertools.groupby(rows, lambda row: row.group):
        title = f"{workload}, {batch} x {length}"
        if (workload, batch, length) in drift:
            title += f" (RoPE measured again: {drift[workload, batch, length]:+.1%})"
        table = TerminalTable(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
        for index, name in enumerate(names):
            table.add_column(name, justify="right" if index else "left", no_wrap=bool(index))
        notes = []
        for row in group:
            found = cells_of(row)
            table.add_row(*(found[name] for name in names), style="yellow" if row.unsteady else None)
            if row.note:
                notes.append(f"  {row.encoding}: {row.note}")
        console.print(table)
        for note in notes:
            console.print(note, highlight=False, markup=False)
    warning = unsteady_warning(rows)
    if warning:
        console.print(warning, style="yellow", highlight=False, markup=False)


def unsteady_warning(rows: Sequence[Row]) -> str:
    """One sentence if measurements vary too much, else empty."""
    count = sum(row.unsteady for row in rows)
    if not count:
        return ""
    return (
        f"This machine is unsteady: in {count} of {len(rows)} measurements (marked{MARK}), times spread over more than "
        f"{UNSTEADY:.0%} of their median. Repeat them on an idle machine before comparing."
    )


def cells_of(row: Row) -> dict[str, str]:
    """The cells of a row by column."""
    spread = "" if row.spread is None else f"{row.spread[0]:.0%} +{row.spread[1]:.0%}{MARK if row.unsteady else ''}"
    return {
        "encoding": row.encoding,
        "ms": row.status if row.ms_median is None else number(row.ms_median),
        "spread": spread,
        "to RoPE": "" if row.ratio is None else f"{row.ratio:.2f}",
        PEAK: "" if row.peak_mib is None else f"{row.peak_mib:,.0f}",
        "GFLOP": "" if row.gflops is None else number(row.gflops),
        "M params": "" if row.params is None else number(row.params / 1e6),
    }


def write_plot(rows: Sequence[Row], path: Path) -> None:
    """Write the plot in the format given by the file's extension."""
    with benchmark_figure(rows) as figure:
        figure.savefig(path, dpi=150)


@contextmanager
def benchmark_figure(rows: Sequence[Row]) -> Iterator[Any]:
    """Time and, where measured, peak memory against length, all logarithmic, a panel for each workload.

    Times have bars from the 10th to the 90th percentile.
    """
    timed = [row for row in rows if row.ms_median is not None and not row.encoding.endswith(AGAIN)]
    several = len({row.batch for row in timed}) > 1
    # the paper's layout of TAPE and TAPE with options are variants of TAPE
    kinds = {name_of(row, several): row.encoding.split()[0].removesuffix("-paper") for row in timed}
    styles = series_styles(kinds)
    panels = []
    for workload in dict.fromkeys(row.workload for row in timed):
        own = sorted((row for row in timed if row.workload == workload), key=lambda row: row.length)
        shown = (
            (workload, "milliseconds", time_line, own),
            (f"{workload}, memory", "MiB at most", memory_line, [row for row in own if row.peak_mib is not None]),
        )
        for title, y_label, line_of, rows_of in shown:
            names = [name for name in kinds if any(name_of(row, several) == name for row in rows_of)]
            lines = [
                line_of(name, styles[name], [row for row in rows_of if name_of(row, several) == name]) for name in names
            ]
            x_label = "tokens attended to" if workload == "decode" else "tokens per sequence"
            if lines:
                panels.append(
                    LinePanel(title=title, x_label=x_label, y_label=y_label, x_log=True, y_log=True, lines=lines)
                )
    with line_figure(panels, size=(5.6, 4.2)) as figure:
        if timed:
            figure.suptitle(title_of(timed, several), fontsize="medium")
        yield figure


def by_length(rows: Sequence[Row]) -> str:
    """Markdown: for each workload and batch size a line per length, with time and memory of every encoding."""
    kept = [row for row in rows if not row.encoding.endswith(AGAIN)]
    first = kept[0]
    parts = [f"{first.shape}, {first.dtype}, {first.gpu}, torch {first.torch}, commit {first.commit}."]
    for workload, batch in dict.fromkeys((row.workload, row.batch) for row in kept):
        group = [row for row in kept if (row.workload, row.batch) == (workload, batch)]
        names = list(dict.fromkeys(row.encoding for row in group))
        figures = {(row.length, row.encoding): by_length_cell(row) for row in group}
        table = Table(
            title=f"{workload}, batch {batch}",
            columns=["tokens", *names],
            rows=[
                cells(f"{length:,}", *(figures.get((length, name), "") for name in names))
                for length in sorted({row.length for row in group})
            ],
        )
        parts.append(f"**{table.title}**: milliseconds (ratio to RoPE), MiB at most")
        parts.append(markdown_table(table))
    return "\n\n".join(parts) + "\n"


def by_length_cell(row: Row) -> str:
    """Time, ratio and memory, or why there is no time."""
    if row.ms_median is None:
        return row.status
    ratio = "" if row.ratio is None else f" ({row.ratio:.2f})"
    memory = "" if row.peak_mib is None else f", {row.peak_mib:,.0f}"
    return f"{number(row.ms_median)}{ratio}{memory}"


def name_of(row: Row, several: bool) -> str:
    """Label of a line: the encoding, plus the batch size if there are several."""
    return f"{row.encoding}, batch {row.batch}" if several else row.encoding


def time_line(name: str, style: Any, rows: Sequence[Row]) -> Line:
    """Medians with percentiles as error bars."""
    medians = [row.ms_median or 0.0 for row in rows]
    return Line(
        label=name,
        style=style,
        x=[row.length for row in rows],
        y=medians,
        low=[row.ms_low or median for row, median in zip(rows, medians, strict=True)],
        high=[row.ms_high or median for row, median in zip(rows, medians, strict=True)],
        bars=True,
    )


def memory_line(name: str, style: Any, rows: Sequence[Row]) -> Line:
    """Peak memory."""
    return Line(label=name, style=style, x=[row.length for row in rows], y=[row.peak_mib or 0.0 for row in rows])


def title_of(rows: Sequence[Row], several: bool) -> str:
    """What was measured, what the bars mean, and whether the machine was unsteady."""
    first = rows[0]
    how = "compiled" if first.compile else "not compiled"
    size = "" if several else f", batch {first.batch}"
    unsteady = "; unsteady machine" if any(row.unsteady for row in rows) else ""
    return (
        f"Time by length: {first.shape}, {first.dtype}, {how}{size}, {first.gpu}\n"
        f"medians, bars from the 10th to the 90th percentile{unsteady}"
    )
