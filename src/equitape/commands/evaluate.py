"""equitape eval."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer
from rich.console import Console

from ..registry import describe_choices
from ..settings import Ge, Settings
from .options import AsJson, OptionsOf, keeping, named_folder, print_json, takes_settings


@dataclass(frozen=True, kw_only=True)
class EvalOptions(Settings):
    """Options of the command."""

    task: tuple[str, ...] = ()
    """perplexity, passkey, needles, scrolls:NAME or lm-eval:NAME."""
    base: str | None = None
    """The pretrained model under an adapter."""
    tokenizer: str | None = None
    """'bytes', or a folder. Default: the model's own."""
    dtype: str = "auto"
    """auto (the file's), float32, bfloat16 or float16."""
    device: str | None = None
    """For example cuda:1. Default: a GPU if available."""
    name: str | None = None
    """Name of the model in reports. Default: the folder's name."""
    out: Path | None = None
    """Folder of results and reports. Default: runs/eval/MODEL/TASK."""
    resume: bool = False
    """Continue the evaluation in --out."""
    batch_tokens: Annotated[int, Ge(1)] | None = None
    """Tokens per batch. Default: as many as fit in memory."""
    no_score: bool = False
    """Only generate answers; score them later with --rescore."""
    rescore: bool = False
    """Score stored answers and rewrite the report, without the model."""
    beside: tuple[str, ...] = ()
    """NAME=FOLDER: show another model's results of this evaluation in the report."""


@takes_settings
def evaluate(
    model: Annotated[
        str,
        typer.Argument(
            help="Folder of a model, run or adapter, a GGUF file, or a name on the Hub. With --rescore: folder of an "
            "evaluation."
        ),
    ],
    given: Annotated[dict[str, Any], OptionsOf(cls=EvalOptions)],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Task options: key=value, or TASK.key=value for one task of several.", show_default=False),
    ] = None,
    json: AsJson = False,
) -> None:
    """Evaluate long-context quality, and short-context quality for comparison.

    perplexity: sliding windows over long documents (data=PATH) by length. passkey: five digits hidden in filler text,
    by length and depth. needles: six RULER-style kinds. scrolls:NAME: qasper, contract_nli, narrative_qa, quality,
    qmsum, summ_screen_fd, gov_report. lm-eval:NAME: a task of lm-evaluation-harness.

    Add --resume to continue after an interruption. Options and protocols: docs/how-to/evaluation.md.
    """
    from ..evaluation import rescore
    from ..report.evaluation import print_report, report_folder

    options = EvalOptions.parse(given, "eval")
    console = Console(stderr=json)
    beside = read_beside(options.beside)
    reports = []

    def show(report: dict[str, Any], folder: Path) -> None:
        report_folder(folder, beside)
        print_report(report, folder, console)
        reports.append(report)

    if not options.rescore:
        run(model, options, overrides or [], beside, console, show)
    elif options.task or overrides:
        raise ValueError("--rescore reads task and options from the evaluation's folder; do not give them.")
    elif unused := [name for name in given if name not in ("rescore", "beside")]:
        raise ValueError(f"--{unused[0].replace('_', '-')} has no effect with --rescore; drop it.")
    else:
        show(rescore(model), Path(model))
    if json:
        print_json(reports)


def run(
    model: str,
    options: EvalOptions,
    overrides: list[str],
    beside: dict[str, Path],
    console: Console,
    show: Callable[[dict[str, Any], Path], None],
) -> None:
    """Evaluate a model on all tasks. show: called with the report of each task and its folder."""
    from ..evaluation.runner import check_out, describe_kept, prepare, read_other, run_prepared
    from ..pretrained.loading import check_model, is_local
    from ..runs.folders import file_name
    from ..runs.progress import Progress
    from ..tasks import EVALUATIONS, build_evaluations
    from ..tasks.evaluated_model import load_evaluated_model, model_label

    if not options.task:
        raise ValueError(f"Nothing to evaluate; give --task.{describe_choices('', EVALUATIONS)}")
    if len(set(options.task)) < len(options.task):
        raise ValueError("A task is given twice; give each task once.")
    if beside and len(options.task) > 1:
        raise ValueError("--beside works with a single task only; give one --task.")
    if beside and options.no_score:
        raise ValueError("--beside has no effect with --no-score, which writes no report; give it with --rescore.")
    label = model_label(model, options.name)
    if label in beside:
        raise ValueError(f"Two models are called {label!r}; rename one with --name, or with --beside NAME=FOLDER.")
    tasks = build_evaluations(options.task, overrides)
    root = options.out or Path("runs") / "eval" / label
    # each task has its own folder, unless --out is the folder of the only one
    alone = options.out is not None and len(tasks) == 1
    folders = [root if alone else root / file_name(task.full_name) for task in tasks]
    # check everything that needs no model before loading it
    for task, folder in zip(tasks, folders, strict=True):
        if not options.no_score:
            task.check_scoring()
        check_out(folder, options.resume)
    if is_local(model):
        check_model(model, options.base)
    for task in tasks:
        task.check_data()
    progress = Progress(console)
    with progress.phase("loading the model"):
        evaluated = load_evaluated_model(
            model,
            base=options.base,
            tokenizer=options.tokenizer,
            dtype=options.dtype,
            device=options.device,
            label=options.name,
        )
    # prepare all tasks before the first one runs, so that errors come early
    prepared = []
    for task, folder in zip(tasks, folders, strict=True):
        with progress.phase(f"preparing {task.full_name}"):
            prepared.append(prepare(evaluated, task, folder, resume=options.resume, score=not options.no_score))
    for other in beside.values():
        read_other(other, prepared[0].settings)
    with progress.over_runs(len(prepared)):
        for each in prepared:
            with keeping(partial(describe_kept, each), resume=True):
                report = run_prepared(each, batch_tokens=options.batch_tokens, progress=progress)
                progress.end_run()
                if each.score:
                    show(report, each.out)
            if not each.score:
                again = f"equitape eval {quote(str(each.out))} --rescore"
                console.print(f"Wrote answers to {each.out}; score them with: {again}", markup=False, soft_wrap=True)


def read_beside(given: tuple[str, ...]) -> dict[str, Path]:
    """Folders of other evaluations by name, from NAME=FOLDER or FOLDER."""
    found: dict[str, Path] = {}
    for name, folder in map(named_folder, given):
        if name in found:
            raise ValueError(f"--beside has two evaluations called {name!r}; rename one with NAME=FOLDER.")
        found[name] = folder
    return found
