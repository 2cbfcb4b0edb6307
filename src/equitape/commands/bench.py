"""equitape bench."""

from typing import Annotated, Any

import typer
from rich.console import Console

from ..bench.shapes import BenchSettings
from .options import AsJson, OptionsOf, takes_settings

OPTIONS = OptionsOf(
    cls=BenchSettings,
    without=("device", "seed", "input_sets"),
    names={
        "workloads": "workload",
        "encodings": "encoding",
        "lengths": "length",
        "cache_lengths": "cache-length",
        "batches": "batch",
    },
    defaults={"workloads": None},
)


@takes_settings
def bench(given: Annotated[dict[str, Any], OPTIONS], json: AsJson = False) -> None:
    """Measure the time, memory and operations of encodings, each compared with RoPE in the same run.

    A result that disagrees with the reference is reported and not timed. The exit code is 1 if a result disagrees or
    a measurement fails.
    """
    from ..bench.rows import DISAGREES, FAILED, Row, read_csv, to_json
    from ..bench.run import run
    from ..report.benchmark import by_length, print_table, write_plot

    settings = BenchSettings.parse(given, "bench")
    console = Console(stderr=json)
    rows: list[Row] = []
    try:
        for row in run(settings, console) if settings.show is None else read_csv(settings.show):
            rows.append(row)
    finally:
        # an interruption keeps finished measurements
        if rows:
            print_table(rows, console)
            if settings.plot is not None:
                write_plot(rows, settings.plot)
            if settings.table is not None:
                settings.table.write_text(by_length(rows))
            written = (None if settings.show else settings.csv, settings.plot, settings.table)
            files = [str(path) for path in written if path is not None]
            if files:
                console.print(f"Written to {' and '.join(files)}.", highlight=False, markup=False, soft_wrap=True)
    if json:
        typer.echo(to_json(rows))
    if any(row.status in (DISAGREES, FAILED) for row in rows):
        raise typer.Exit(1)
