"""Printing adapted models and fine-tuning results on a terminal."""

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..model import EquitapeForCausalLM
from ..pretrained.longlora import ShiftedSparseAttention
from ..pretrained.methods import summarize_training
from ..pretrained.settings import adaptation_of
from ..registry import counted
from ..runs.progress import describe_seconds


def show_model(model: EquitapeForCausalLM, console: Console) -> None:
    """Print the base, the method, and what it trains."""
    adaptation = adaptation_of(model)
    settings = adaptation.settings
    assert isinstance(model.config.encoding, dict)
    encoding = model.config.encoding
    positions = f"{encoding['kind']}, base {encoding.get('theta', 0):g}"
    scaling = encoding.get("scaling", {})
    interpolated = scaling.get("kind", "default") != "default"
    if interpolated:
        positions += f", {scaling['kind']} by {scaling['factor']:g}"
    table = Table(show_header=False)
    table.add_row("base", escape(adaptation.base_name))
    table.add_row("method", escape(f"{settings.method}: {settings.effects.idea}"))
    table.add_row("context", f"{model.config.context:,} tokens")
    table.add_row("positions", positions)
    attention = model.model.training_attention
    if isinstance(attention, ShiftedSparseAttention):
        seen = f"shifted groups of {attention.group_size:,} tokens"
        if not interpolated:
            seen += "; larger distances are not trained unless positions are interpolated (--scaling linear)"
        table.add_row("while training", seen)
    table.add_row("trains", str(summarize_training(model)))
    console.print(table)


def show_plan(plan: dict[str, Any], console: Console) -> None:
    """What a fine-tuning run would do and cost."""
    table = Table(show_header=False)
    table.add_row("base", escape(plan["base"]))
    table.add_row("method", f"{plan['method']}, {plan['trained']['parameters']:,} parameters train")
    data = plan["data"]
    documents, rows, steps = counted(data["documents"], "document"), counted(data["rows"], "row"), plan["steps"]
    table.add_row("training data", f"{documents}, {data['tokens']:,} tokens, {rows}")
    table.add_row("training", f"{counted(steps, 'step')}, {plan['tokens']:,} tokens, {plan['epochs']:.2g} epochs")
    if plan["note"]:
        table.add_row("memory", escape(plan["note"]))
    else:
        memory = "unknown" if plan["peak_mib"] is None else f"about {plan['peak_mib']:,.0f} MiB on {plan['device']}"
        table.add_row("memory", memory)
        training, scoring = (describe_seconds(plan[key]) for key in ("training_seconds", "scoring_seconds"))
        table.add_row("time", f"about {training} of training and {scoring} of scoring, from one measured step")
    console.print(table)
    console.print("This was a dry run: nothing was trained or written.")


def show_results(report: dict[str, Any], console: Console) -> None:
    """Print the result of a fine-tuning run."""
    run, trained = report["run"], report["trained"]
    if report["status"] != "done":
        console.print(f"[red]{escape(report['status'])}:[/red] {escape(report['note'])}")
    table = Table(title=escape(f"{report['base']}, {report['method']}, context {report['context']:,}"))
    for column in ("perplexity of", "length", "before", "after", "windows"):
        table.add_column(column, justify="left" if column == "perplexity of" else "right")
    for entry in report["perplexity"]:
        figures = (entry["perplexity_before"], entry["perplexity_after"])
        shown = ["" if figure is None else f"{figure:.4g}" for figure in figures]
        table.add_row(escape(entry["data"]), f"{entry['length']:,}", *shown, f"{entry['windows']:,}")
    console.print(table)
    speed = f"{run['tokens_per_second']:,.0f} tokens/s"
    memory = "" if run["peak_mib"] is None else f", {run['peak_mib']:,.0f} MiB at most"
    console.print(
        f"Trained {trained['parameters']:,} parameters ({trained['share']:.3%} of the model) for "
        f"{counted(run['steps'], 'step')}, {run['tokens']:,} tokens, {run['seconds']:.0f} s ({speed}{memory})."
    )
