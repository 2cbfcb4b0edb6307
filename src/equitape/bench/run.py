"""The benchmark, from settings to rows."""

from collections.abc import Iterator
from typing import Any

from rich.console import Console

from ..runs.errors import is_out_of_memory, named_line
from .agreement import DisagreementError, checked_run
from .measure import count_operations, free_memory, time_run
from .rows import AGAIN, DISAGREES, FAILED, OUT_OF_MEMORY, Row, append_csv, environment
from .shapes import BenchSettings
from .workloads import MEASURES, Case, Variant


def run(settings: BenchSettings, console: Console) -> Iterator[Row]:
    """Measure what the settings ask for. Each row is written to the CSV file as soon as it is measured."""
    about = environment(settings.torch_device)
    references: dict[tuple[str, int, int], float] = {}
    for case, repeated in list_cases(settings):
        name = case.encoding + (AGAIN if repeated else "")
        with console.status(f"{case.measure}, {name}, {case.batch} x {case.length}"):
            row = measure(case, name, settings, about)
        if row.ms_median is not None:
            if name == "rope":
                references[row.group] = row.ms_median
            if row.group in references:
                row.ratio = row.ms_median / references[row.group]
        if settings.csv is not None:
            append_csv(settings.csv, row)
        if not console.is_terminal:
            # show progress in logs
            found = row.status if row.ms_median is None else f"{row.ms_median:.3f} ms"
            console.print(
                f"{row.workload}, {row.encoding}, {row.batch} x {row.length}: {found}", highlight=False, markup=False
            )
        yield row


def list_cases(settings: BenchSettings) -> Iterator[tuple[Case, bool]]:
    """All cases in order of measurement; cases to compare are adjacent. True marks RoPE's second measurement."""
    for workload in settings.workloads:
        lengths = settings.all_cache_lengths if workload == "decode" else settings.all_lengths
        for measured in MEASURES[workload]:
            for batch in settings.all_batches:
                for length in lengths:
                    encodings = settings.encodings_for(workload)
                    for index, encoding in enumerate(encodings):
                        case = Case(
                            measure=measured,
                            encoding=encoding,
                            shape=settings.model_shape,
                            batch=batch,
                            length=length,
                            dtype=settings.torch_dtype,
                            device=settings.torch_device,
                            seed=settings.seed,
                            input_sets=settings.input_sets,
                        )
                        yield case, encoding in encodings[:index]


def measure(case: Case, name: str, settings: BenchSettings, about: dict[str, Any]) -> Row:
    """One row. A case that disagrees with the reference, runs out of memory or fails has no time."""
    row = Row(
        **about,
        dtype=str(case.dtype).removeprefix("torch."),
        compile=_compiled(case, settings),
        shape=case.shape.name,
        workload=case.measure,
        encoding=name,
        batch=case.batch,
        length=case.length,
    )
    try:
        _fill(row, case, settings)
    except DisagreementError as error:
        row.status, row.note = DISAGREES, str(error)
    except Exception as error:
        # a failing encoding must not stop the others
        if is_out_of_memory(error):
            row.status = OUT_OF_MEMORY
        else:
            row.status, row.note = FAILED, named_line(error)[:200]
    free_memory()
    return row


def _fill(row: Row, case: Case, settings: BenchSettings) -> None:
    operations = count_operations(case)
    if operations is not None:
        row.gflops, row.gmacs = operations / 1e9, operations / 2e9
    compiled = _compiled(case, settings)
    variant = Variant(dtype=case.dtype, compiled=compiled, graphs=settings.graphs and compiled)
    prepared, compared = checked_run(case, variant)
    row.params = prepared.num_parameters
    timing = time_run(prepared, case, settings.num_runs, settings.warm_up, settings.seconds)
    runs = len(timing.milliseconds)
    notes = (
        "CUDA graphs" if prepared.graphs else "",
        prepared.note,
        compared,
        f"{runs} runs" if runs < settings.num_runs else "",
    )
    row.note = ", ".join(part for part in notes if part)
    row.ms_median, (row.ms_low, row.ms_high) = timing.median, timing.spread
    row.peak_mib = None if prepared.graphs else timing.peak_mib


def _compiled(case: Case, settings: BenchSettings) -> bool:
    chosen = case.subject.compile
    return settings.compiled if chosen is None else chosen
