"""equitape bench."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def bench(
    shape: Annotated[str | None, typer.Option(help="Model size: tiny, 155m, smollm2-135m or 1.1b.")] = None,
    layers: Annotated[int | None, typer.Option(help="Another depth than the shape's.")] = None,
    width: Annotated[int | None, typer.Option(help="Another hidden size than the shape's.")] = None,
    workload: Annotated[
        list[str] | None,
        typer.Option(help="attention (a layer), core (without its projections), train, prefill or decode; repeatable."),
    ] = None,
    encoding: Annotated[
        list[str] | None,
        typer.Option(help="Encoding, or tape-paper: TAPE in the paper's layout, for attention and core; repeatable."),
    ] = None,
    length: Annotated[list[int] | None, typer.Option(help="Tokens in a sequence; repeatable.")] = None,
    cache_length: Annotated[
        list[int] | None, typer.Option(help="Tokens a decoding step attends to; repeatable. As --length when left out.")
    ] = None,
    batch: Annotated[list[int] | None, typer.Option(help="Sequences in a batch; repeatable.")] = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16, float16 or float32.")] = None,
    compile: Annotated[
        bool | None,
        typer.Option(
            "--compile/--no-compile", help="torch.compile, and CUDA graphs to decode; on where there is CUDA."
        ),
    ] = None,
    graphs: Annotated[
        bool,
        typer.Option(
            "--graphs",
            help="Training steps and prefills as CUDA graphs too, as torch.compile's mode reduce-overhead makes them: "
            "times without a wait for the host. CUDA only.",
        ),
    ] = False,
    runs: Annotated[int | None, typer.Option(help="Timed runs of each: 20 or more, fewer only with --quick.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few runs, to see whether it works.")] = False,
    once: Annotated[
        bool,
        typer.Option("--once", help="Leave out RoPE's second turn at the end, which shows how steady the machine is."),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON for programs to read.")] = False,
    csv: Annotated[Path | None, typer.Option(help="Append a line for each measurement to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Plot time against length into this picture.")] = None,
) -> None:
    """Measure what encodings cost: time, memory and operations, each beside RoPE's in the same run.

    Sizes left out follow the device: the 155m shape in bfloat16 on CUDA, a tiny one in float32 on the CPU.

    A result that disagrees with the reference is reported and not timed; exit code 1 tells so, and failures too.
    """
    from ..bench import WORKLOADS, BenchSettings
    from ..bench.rows import DISAGREES, FAILED, Row, to_json
    from ..bench.run import run
    from ..report.benchmark import print_table, write_plot

    def chosen(values: list | None) -> tuple | None:
        return tuple(values) if values else None

    try:
        settings = BenchSettings(
            shape=shape,
            layers=layers,
            width=width,
            workloads=chosen(workload) or WORKLOADS,
            encodings=chosen(encoding),
            lengths=chosen(length),
            cache_lengths=chosen(cache_length),
            batches=chosen(batch),
            dtype=dtype,
            compile=compile,
            graphs=graphs,
            runs=runs,
            quick=quick,
            once=once,
            csv=csv,
            plot=plot,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    console = Console(stderr=json)
    rows: list[Row] = []
    try:
        for row in run(settings, console):
            rows.append(row)
    finally:
        # an interruption keeps what is measured
        if rows:
            print_table(rows, console)
            if plot is not None:
                write_plot(rows, plot)
            files = [str(path) for path in (csv, plot) if path is not None]
            if files:
                console.print(f"Written to {' and '.join(files)}.", highlight=False, markup=False, soft_wrap=True)
    if json:
        typer.echo(to_json(rows))
    if any(row.status in (DISAGREES, FAILED) for row in rows):
        raise typer.Exit(1)
