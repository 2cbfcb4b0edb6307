"""What `equitape eval` does, from its arguments to the reports."""

import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..pretrained.loading import check_model, is_local
from ..registry import describe_choices
from ..report.evaluation import MARKDOWN, PAGE, report_folder
from ..report.numbers import duration, number, readable
from ..settings import describe_settings
from ..tasks.evaluation import EvaluationTask
from ..values import parse_value, split_pair
from . import EVALUATIONS, build_evaluation, load_evaluated_model, rescore
from .loading import model_label
from .runner import check_out, describe_kept, make_plan, run_plan


@dataclass(frozen=True, kw_only=True)
class EvalCommand:
    """The arguments of the command."""

    model: str
    tasks: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    base: str | None = None
    tokenizer: str | None = None
    dtype: str = "auto"
    device: str | None = None
    name: str | None = None
    out: Path | None = None
    resume: bool = False
    batch_tokens: int | None = None
    score: bool = True
    rescore: bool = False
    beside: tuple[str, ...] = ()


def run(command: EvalCommand, console: Console) -> list[dict[str, Any]]:
    """Evaluate or score again, and show what came out. Returns the reports."""
    beside = read_beside(command.beside)
    if command.rescore:
        if command.tasks or command.overrides:
            raise ValueError("--rescore takes task and options from the folder of the evaluation; leave them out.")
        report = rescore(command.model)
        report_folder(command.model, beside)
        show_report(report, Path(command.model), console)
        return [report]
    if not command.tasks:
        raise ValueError(f"Say what to evaluate, by --task.{describe_choices('', EVALUATIONS)}")
    if len(set(command.tasks)) < len(command.tasks):
        raise ValueError("A task is named twice; its second run would only repeat the first.")
    if beside and len(command.tasks) > 1:
        raise ValueError("--beside is for one task at a time.")
    tasks = build_tasks(command.tasks, command.overrides)
    root = command.out or Path("runs") / "eval" / model_label(command.model, command.name)
    # each task has its own folder, unless --out names the folder of the only one
    alone = command.out is not None and len(tasks) == 1
    folders = [root if alone else root / re.sub(r"[^A-Za-z0-9._-]+", "-", task.full_name) for task in tasks]
    # everything that can be refused without the model is refused before it is loaded
    for task, folder in zip(tasks, folders, strict=True):
        if command.score:
            task.check_scoring()
        check_out(folder, command.resume)
    if is_local(command.model):
        check_model(command.model, command.base)
    for task in tasks:
        task.check_data()
    evaluated = load_evaluated_model(
        command.model,
        base=command.base,
        tokenizer=command.tokenizer,
        dtype=command.dtype,
        device=command.device,
        label=command.name,
    )
    # prepare all tasks before the first one runs, so that errors come first
    plans = [
        make_plan(evaluated, task, folder, resume=command.resume, score=command.score)
        for task, folder in zip(tasks, folders, strict=True)
    ]
    reports = []
    for plan in plans:
        try:
            report = run_plan(plan, batch_tokens=command.batch_tokens, console=console)
        except KeyboardInterrupt:
            arguments = [argument for argument in sys.argv[1:] if argument != "--resume"]
            line = shlex.join(["equitape", *arguments, "--resume"])
            console.print(f"{describe_kept(plan)} Continue with: {line}", highlight=False, markup=False, soft_wrap=True)
            raise SystemExit(130) from None
        if not command.score:
            console.print(f"Answers are in {plan.out}; score them with: equitape eval {plan.out} --rescore")
            continue
        report_folder(plan.out, beside)
        show_report(report, plan.out, console)
        reports.append(report)
    return reports


def build_tasks(names: tuple[str, ...], overrides: tuple[str, ...]) -> list[EvaluationTask]:
    """Every task with its options: key=value for all that have such an option, TASK.key=value for one of them."""
    options: dict[str, dict[str, Any]] = {name: {} for name in names}
    for override in overrides:
        path, text = split_pair(override, "lengths=1024,8192")
        owner, dot, key = path.rpartition(".")
        value = parse_value(text, f"The value of {path}")
        if dot:
            if owner not in options:
                raise ValueError(f"{override!r}: there is no task {owner!r} here.{describe_choices(owner, options)}")
            options[owner][key] = value
            continue
        taking = [name for name in names if key in option_names(name)]
        if not taking:
            known = sorted({option for name in names for option in option_names(name)})
            raise ValueError(f"No task here has an option {key!r}.{describe_choices(key, known)}")
        for name in taking:
            options[name][key] = value
    return [build_evaluation(name, options[name]) for name in names]


def option_names(name: str) -> list[str]:
    """What a task can be told."""
    return list(describe_settings(EVALUATIONS[name.partition(":")[0]].options_class))


def read_beside(given: tuple[str, ...]) -> dict[str, Path]:
    """NAME=FOLDER or FOLDER, of evaluations to show beside."""
    found: dict[str, Path] = {}
    for entry in given:
        name, equals, folder = entry.partition("=")
        path = Path(folder if equals else entry)
        label = name if equals else path.name
        if label in found:
            raise ValueError(f"--beside names {label!r} twice; give other names, as NAME=FOLDER.")
        found[label] = path
    return found


def show_report(report: dict[str, Any], folder: Path, console: Console) -> None:
    """The figures on a terminal."""
    table = Table(title=escape(f"{report['task']}: {report['model']['name']}"))
    table.add_column("")
    table.add_column("", justify="right")
    for name, value in report["metrics"].items():
        table.add_row(escape(readable(name)), number(value))
    for name, value in report["short"].items():
        table.add_row(escape(f"short: {readable(name)}"), number(value))
    console.print(table)
    for sentence in (*report["protocol"], *report["notes"]):
        console.print(escape(sentence), highlight=False)
    seconds = report["cost"]["seconds"]
    if seconds is not None:
        console.print(f"{duration(seconds)} on {report['environment']['device']}.", highlight=False)
    console.print(
        f"Written to {folder}: {PAGE}, {MARKDOWN}, report.json, results.jsonl.", highlight=False, soft_wrap=True
    )
