"""Printing checked recipes and results on a terminal."""

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..registry import counted
from ..runs.results import Comparison, RunResult, find_metric
from ..tasks import Task
from .checked import CheckedRecipe, describe_checked


def show_checked(checked: CheckedRecipe, console: Console) -> None:
    """Print what a recipe would run."""
    described = describe_checked(checked)
    console.print(f"[bold]{escape(checked.recipe.name)}[/bold] {escape(checked.recipe.description)}".strip())
    table = Table(show_header=False)
    for name in ("task", "data", "trained_length", "tested_length", "budget", "batch_size", "evaluation"):
        if described[name]:
            table.add_row(name.replace("_", " "), escape(str(described[name])))
    for label, about in described["encodings"].items():
        seeds = f"{'seed' if len(about['seeds']) == 1 else 'seeds'} {', '.join(map(str, about['seeds']))}"
        table.add_row(escape(label), f"{about['parameters']:,} parameters, {seeds}")
    console.print(table)
    if checked.task.warning:
        console.print(f"Warning: {escape(checked.task.warning)}", highlight=False)
    console.print("Dry run: nothing was trained.")


def metric_title(task: Task, name: str) -> str:
    """A figure of a task as words, with its unit and an arrow towards better values."""
    return find_metric(task.metrics, name, task.headline, task.higher_is_better).title(name)


def show_run(result: RunResult, task: Task, console: Console) -> None:
    """Print the figures of one run."""
    if result.evaluation is None:
        console.print(f"[red]{escape(result.status)}:[/red] {escape(result.note)}")
        return
    table = Table(show_header=False, title=f"{escape(result.label)}, seed {result.seed}")
    for name, value in result.evaluation.metrics.items():
        table.add_row(metric_title(task, name), format_number(value))
    table.add_row("parameters", f"{result.parameters:,}")
    table.add_row("training", f"{result.seconds:.1f} s, {result.tokens_per_second:,.0f} tokens/s")
    if result.peak_mib is not None:
        table.add_row("peak memory", f"{result.peak_mib:,.0f} MiB")
    console.print(table)


def show_results(results: Comparison, console: Console) -> None:
    """Print one line per run, with the headline and as many other metrics as fit."""
    evaluations = [run.evaluation for run in results.runs if run.evaluation is not None]
    names = list(dict.fromkeys(name for evaluation in evaluations for name in evaluation.metrics))
    headline = results.task.headline
    shown = [headline, *[name for name in names if name != headline][:3]] if names else []
    # measure in a wide console: in its own width, every table claims to fit
    wide = console.options.update(width=1000)
    while len(shown) > 1 and console.measure(results_table(results, shown), options=wide).minimum > console.width:
        shown.pop()
    console.print(results_table(results, shown))
    left_out = len(set(names) - set(shown))
    if left_out:
        console.print(f"The report has {counted(left_out, 'more metric')} per run.", highlight=False)


def results_table(results: Comparison, shown: list[str]) -> Table:
    """One line per run with some metrics; only encoding labels wrap."""
    table = Table(title=escape(results.name))
    table.add_column("encoding", overflow="fold")
    # a word per line, the arrow next to the last one
    titles = ["\n".join(results.task.metric(name).title(name).split()).replace("\n↑", " ↑") for name in shown]
    for column in ("seed", "parameters", "training", *(title.replace("\n↓", " ↓") for title in titles)):
        table.add_column(column, justify="right", no_wrap=True, overflow="fold")
    for run in results.runs:
        if not run.done:
            table.add_row(escape(run.label), str(run.seed), "", f"[red]{run.status}[/red]")
            continue
        values = [format_number(run.metric(name)) for name in shown]
        cost = f"{run.seconds:.0f} s"
        table.add_row(escape(run.label), str(run.seed), f"{run.parameters:,}", cost, *values)
    return table


def format_number(value: float | None) -> str:
    """Four significant digits."""
    return "-" if value is None else f"{value:.4g}"
