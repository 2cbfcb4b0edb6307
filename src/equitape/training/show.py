"""Plans and results on a terminal."""

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .plan import Plan, describe_plan


def show_plan(plan: Plan, console: Console) -> None:
    """What running a recipe would do."""
    told = describe_plan(plan)
    console.print(f"[bold]{escape(plan.recipe.name)}[/bold] {escape(plan.recipe.description)}".strip())
    table = Table(show_header=False)
    for name in ("task", "data", "trained_length", "tested_length", "budget", "batch_size", "evaluation"):
        if told[name]:
            table.add_row(name.replace("_", " "), escape(str(told[name])))
    for label, about in told["encodings"].items():
        seeds = ", ".join(map(str, about["seeds"]))
        table.add_row(escape(label), f"{about['parameters']:,} parameters, seeds {seeds}")
    console.print(table)
    console.print("Nothing was trained: this was a dry run.")


def show_run(entry: dict[str, Any], console: Console) -> None:
    """What one run came to."""
    if entry["status"] != "done":
        console.print(f"[red]{escape(entry['status'])}:[/red] {escape(entry['note'])}")
        return
    table = Table(show_header=False, title=f"{escape(entry['label'])}, seed {entry['seed']}")
    for name, value in entry["evaluation"]["metrics"].items():
        table.add_row(name.replace("_", " "), format_number(value))
    table.add_row("parameters", f"{entry['parameters']:,}")
    table.add_row("training", f"{entry['seconds']:.1f} s, {entry['tokens_per_second']:,.0f} tokens/s")
    if entry["peak_mib"] is not None:
        table.add_row("peak memory", f"{entry['peak_mib']:,.0f} MiB")
    console.print(table)


def show_results(results: dict[str, Any], console: Console) -> None:
    """All runs, one line each, with the headline and as many other metrics as have room."""
    done = [run for run in results["runs"] if run["status"] == "done"]
    names = list(dict.fromkeys(name for run in done for name in run["evaluation"]["metrics"]))
    headline = results["task"]["headline"]
    shown = [headline, *[name for name in names if name != headline][:3]] if names else []
    # measured with room to spare: within the console's own width every table is said to fit
    roomy = console.options.update(width=1000)
    while len(shown) > 1 and console.measure(results_table(results, shown), options=roomy).minimum > console.width:
        shown.pop()
    console.print(results_table(results, shown))
    left_out = len(set(names) - set(shown))
    if left_out:
        console.print(f"More metrics of every run, {left_out} of them, are in the report.", highlight=False)


def results_table(results: dict[str, Any], shown: list[str]) -> Table:
    """A line a run with some of its metrics, a word of their names a line; only names of encodings are folded."""
    table = Table(title=escape(results["name"]))
    table.add_column("encoding", overflow="fold")
    for column in ("seed", "parameters", "training", *(name.replace("_", "\n") for name in shown)):
        table.add_column(column, justify="right", no_wrap=True, overflow="fold")
    for run in results["runs"]:
        if run["status"] != "done":
            table.add_row(escape(run["label"]), str(run["seed"]), "", f"[red]{run['status']}[/red]")
            continue
        values = [format_number(run["evaluation"]["metrics"].get(name)) for name in shown]
        cost = f"{run['seconds']:.0f} s"
        table.add_row(escape(run["label"]), str(run["seed"]), f"{run['parameters']:,}", cost, *values)
    return table


def format_number(value: float | None) -> str:
    """Four significant digits."""
    return "-" if value is None else f"{value:.4g}"
