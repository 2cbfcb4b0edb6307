"""equitape eval."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console


def evaluate(
    model: Annotated[
        str,
        typer.Argument(help="Folder of a model, run or adapter, or a GGUF file; with --rescore, of an evaluation."),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Options of tasks: key=value, or TASK.key=value for one of several.", show_default=False),
    ] = None,
    task: Annotated[
        list[str] | None,
        typer.Option(help="perplexity, passkey, needles, scrolls:NAME or lm-eval:NAME; repeatable."),
    ] = None,
    base: Annotated[str | None, typer.Option(help="The pretrained model under an adapter.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="'bytes', or a folder. Default: the model's own.", show_default=False)
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto (the file's), float32, bfloat16 or float16.")] = "auto",
    device: Annotated[
        str | None,
        typer.Option(help="For example cuda:1. Default: a GPU where there is one.", show_default=False),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the model in reports. Default: its folder's name.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of results and reports. Default: runs/eval/MODEL/TASK.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the evaluation in that folder.")] = False,
    batch_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens per batch. Default: what fits into memory.")
    ] = None,
    no_score: Annotated[
        bool, typer.Option("--no-score", help="Only generate answers; score them later with --rescore.")
    ] = False,
    rescore: Annotated[
        bool, typer.Option("--rescore", help="Write the report of an evaluation again, without the model.")
    ] = False,
    beside: Annotated[
        list[str] | None,
        typer.Option(help="NAME=FOLDER of the same evaluation of another model, shown in the same report. Repeatable."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the reports as JSON for programs to read.")] = False,
) -> None:
    """Evaluate long-context quality, and quality at short lengths for comparison.

    perplexity: sliding windows over long documents (data=PATH) by length. passkey: five digits hidden in filler, by
    length and depth. needles: six kinds in the manner of RULER. scrolls:NAME: qasper, contract_nli, narrative_qa,
    quality, qmsum, summ_screen_fd, gov_report. lm-eval:NAME: a task of lm-evaluation-harness.

    After an interruption, the same command with --resume continues. Options and protocols: docs/how-to/evaluation.md.
    """
    from ..evaluation.command import EvalCommand, run

    try:
        reports = run(
            EvalCommand(
                model=model,
                tasks=tuple(task or ()),
                overrides=tuple(overrides or ()),
                base=base,
                tokenizer=tokenizer,
                dtype=dtype,
                device=device,
                name=name,
                out=out,
                resume=resume,
                batch_tokens=batch_tokens,
                score=not no_score,
                rescore=rescore,
                beside=tuple(beside or ()),
            ),
            Console(stderr=json),
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if json:
        typer.echo(to_json(reports))


def to_json(reports: list[dict[str, Any]]) -> str:
    """For programs; the option of the same name hides the module in the command."""
    import json

    return json.dumps(reports, indent=1)
