"""equitape extend."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ..extend.settings import BUDGETS, ExtendSettings
from .options import AsJson, OptionsOf, keeping, print_json, table_of, takes_settings

if TYPE_CHECKING:
    from ..extend.prepare import Prepared
    from ..runs.extension import Extension

PLAN = (
    "to", "method", "scaling", "scaling_factor", "theta", "query_growth", "lora_rank", "lora_alpha", "lora_targets",
    "tape", "row_length", "batch_size", "whole_rows", "jumps", "recall", "learning_rate", "memory", "compile", "seed",
)  # fmt: skip
NAMES = {"lora_targets": "lora-target"}
PROOF = (
    "measure", "eval_data", "eval_lengths", "needle_lengths", "text_lengths", "samples", "windows", "harness",
    "batch_tokens", "tolerance", "retrieval_tolerance", "compare",
)  # fmt: skip
FILES = ("data", "tokenizer", "save")


@takes_settings
def extend(
    base: Annotated[str, typer.Argument(help="A folder with safetensors, a GGUF file, or a name on the Hub.")],
    plan: Annotated[
        dict[str, Any], OptionsOf(cls=ExtendSettings, panel="Plan", only=PLAN, names=NAMES, required=("to",))
    ],
    budget: Annotated[dict[str, Any], OptionsOf(cls=ExtendSettings, panel="Budget", only=BUDGETS)],
    proof: Annotated[dict[str, Any], OptionsOf(cls=ExtendSettings, panel="Proof", only=PROOF)],
    files: Annotated[dict[str, Any], OptionsOf(cls=ExtendSettings, only=FILES)],
    out: Annotated[
        Path | None, typer.Option(help="Folder of adapter, model card and report. Default: runs/extend/BASE-TO.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the extension in that folder.")] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Do only this column of the tables, original, extended or a comparator, so that several processes "
            "share the work; the same command with --resume instead then writes the report. Repeatable.",
            metavar="NAME",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything and show the plan with its estimates, without training.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Extend a pretrained model to a longer context, and measure it before and after.

    Trains on short rows whose position ids jump ahead, so that 64k tokens need no rows of 64k. Then it measures
    perplexity by length, passkey and needles, and what the change cost at short lengths. The exit code is 1 and the
    first line says why where the result is not a success.

    After a kill, the same command with --resume continues. On several devices: accelerate launch -m equitape extend ...
    """
    from ..extend.prepare import check_out, check_place, default_folder, join_processes, prepare
    from ..extend.run import run, run_columns
    from ..runs.progress import Progress

    console = Console(stderr=True)
    settings = ExtendSettings.parse({**plan, **budget, **proof, **files}, "extend")
    folder = out or default_folder(base, settings)
    processes = join_processes()
    first = processes.is_main_process
    if first:
        check_place(folder, settings, resume=resume or bool(only) or dry_run)
    with Progress(console).phase("reading the texts"):
        prepared = prepare(base, settings)
    if dry_run:
        check_out(prepared, folder, resume=True)
        show_plan(prepared, Console(), json)
        return
    if only and processes.num_processes > 1:
        raise ValueError("--only divides the columns among separate commands; start it without accelerate launch.")
    if first:
        check_out(prepared, folder, resume or bool(only))
    if first and not json and not only:
        show_plan(prepared, console, False)
    memory = "The device ran out of memory; use a shorter --row-length or a smaller --batch-size in another folder."
    with keeping(lambda: f"{folder} keeps what was done.", resume=True, memory=memory):
        if only:
            run_columns(prepared, folder, only, console)
            return
        extension = run(prepared, folder, resume=resume, console=console)
    if json and first:
        print_json(extension.to_dict())
    elif first:
        show_extension(extension, folder, Console())
    if not extension.verdict.success:
        raise typer.Exit(1)


def show_plan(prepared: "Prepared", console: Console, as_json: bool) -> None:
    """Every choice with its reason."""
    from rich.markup import escape

    choices = prepared.plan.choices
    if as_json:
        print_json([vars(choice) for choice in choices])
        return
    title = f"{Path(prepared.base).name}: {prepared.config.context:,} to {prepared.settings.to:,} tokens"
    rows = [(choice.name, choice.value, choice.reason) for choice in choices]
    console.print(table_of(("", "choice", "reason"), rows, title))
    for note in prepared.notes:
        console.print(escape(note), highlight=False)


def show_extension(extension: "Extension", folder: Path, console: Console) -> None:
    """The verdict, the figures before and after, and how to try the model."""
    from rich.markup import escape

    from ..report.extension import better_columns, damage_table, figures_table, is_trained, try_command

    colour = "green" if extension.verdict.success else "red"
    console.print(f"[{colour}]{escape(extension.verdict.sentence)}[/{colour}]", highlight=False, soft_wrap=True)
    for sentence in better_columns(extension):
        console.print(escape(sentence), highlight=False, soft_wrap=True)
    for content in (figures_table(extension), damage_table(extension)):
        rows = [[cell.text for cell in row] for row in content.rows]
        console.print(table_of(content.columns, rows, content.title, numbers=True))
    console.print(f"Report, model card and figures are in {folder}.", highlight=False, markup=False, soft_wrap=True)
    if is_trained(extension):
        console.print(f"Try it: {escape(try_command(extension))}", highlight=False, soft_wrap=True)
