"""Runs an evaluation so that nothing done is lost, and writes its report.

The folder of an evaluation holds

    settings.json    what decides the results; a run with other settings is refused here
    results.jsonl    one line per unit, written when it is done
    cost.json        time, tokens and memory so far, and where it ran
    report.json      figures, protocol, notes, environment
    report.md        the same to read
    *.png            heat maps, curves and bars
"""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ..runs.environment import describe_environment
from ..runs.files import plain, write_json
from ..runs.identity import Difference, check_folder, find_differences
from ..runs.lock import locked
from ..runs.progress import Progress
from ..tasks import build_evaluation
from ..tasks.decoding import batches_of
from ..tasks.evaluated_model import EvaluatedModel
from ..tasks.evaluation import Advance, EvaluationTask, Record, Unit

SETTINGS, RESULTS, REPORT = "settings.json", "results.jsonl", "report.json"
COST = "cost.json"
FORMAT = 1
UNIMPORTANT = ("format", "model.name", "options.data", "options.filler", "examples.source")
"""Names, and where data lies: what matters is its digest, among the examples."""
COMPARED = ("task", "options", "examples")
"""What must be the same in evaluations that are compared."""


def evaluate(
    evaluated: EvaluatedModel,
    task: EvaluationTask,
    out: Path | str,
    *,
    resume: bool = False,
    batch_tokens: int | None = None,
    score: bool = True,
    console: Console | None = None,
) -> dict[str, Any]:
    """Run every unit of a task that is not done yet, and return the content of report.json.

    resume: continue what the folder holds. batch_tokens: tokens per batch; default: what fits into memory. score: False
    only writes the answers and returns the settings; `rescore` makes the report later.
    """
    prepared = prepare(evaluated, task, out, resume=resume, score=score)
    return run_prepared(prepared, batch_tokens=batch_tokens, console=console)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """An evaluation that is prepared and checked."""

    evaluated: EvaluatedModel
    task: EvaluationTask
    out: Path
    units: list[Unit]
    settings: dict[str, Any]
    score: bool


def prepare(
    evaluated: EvaluatedModel, task: EvaluationTask, out: Path | str, *, resume: bool = False, score: bool = True
) -> Prepared:
    """Make all examples and refuse what cannot be done. Nothing is written."""
    out = Path(out)
    if score:
        task.check_scoring()
    units = task.prepare(evaluated)
    settings = describe_settings(evaluated, task, units)
    check_folder(out, "evaluation", SETTINGS, lambda: differences(out, settings), resume=resume)
    return Prepared(evaluated=evaluated, task=task, out=out, units=units, settings=settings, score=score)


def run_prepared(
    prepared: Prepared, *, batch_tokens: int | None = None, console: Console | None = None
) -> dict[str, Any]:
    """`evaluate` once everything is prepared."""
    with locked(prepared.out):
        write_json(prepared.out / SETTINGS, prepared.settings)
        done = {key for key, record in read_results(prepared.out).items() if "error" not in record}
        waiting = [unit for unit in prepared.units if unit.key not in done]
        run_units(prepared.evaluated, prepared.task, waiting, prepared.out, batch_tokens, Progress(console))
        return rescore(prepared.out) if prepared.score else prepared.settings


def describe_settings(evaluated: EvaluatedModel, task: EvaluationTask, units: list[Unit]) -> dict[str, Any]:
    """Everything that decides the results."""
    content = {
        "format": FORMAT,
        "task": task.full_name,
        "options": task.settled_options(),
        "examples": {"units": len(units), **task.identity()},
        "model": evaluated.describe(),
    }
    return json.loads(json.dumps(plain(content)))


def check_out(out: Path, resume: bool) -> None:
    """Refuse a folder that cannot take an evaluation. This needs no model and is checked before one is loaded."""
    check_folder(out, "evaluation", SETTINGS, list, resume=resume)


def differences(out: Path, settings: dict[str, Any]) -> list[Difference]:
    """Settings in which an evaluation differs from the one in a folder."""
    return find_differences(read_settings(out), settings, UNIMPORTANT)


def differences_between(one: dict[str, Any], other: dict[str, Any]) -> list[Difference]:
    """Settings in which the reports of two evaluations differ, apart from the model."""
    old, new = ({key: each.get(key) for key in COMPARED} for each in (one, other))
    return find_differences(old, new, UNIMPORTANT)


def read_settings(out: Path) -> dict[str, Any]:
    """The settings with which an evaluation was started."""
    try:
        settings = json.loads((out / SETTINGS).read_text())
        if settings["format"] > FORMAT:
            raise ValueError(f"format {settings['format']} is of a later version")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{str(out)!r} holds no evaluation that can be read ({error}).") from None
    return settings


def read_results(out: Path) -> dict[str, Record]:
    """Records by unit. A last line that an interruption cut off is removed from the file."""
    path = out / RESULTS
    if not path.exists():
        return {}
    text = path.read_text(encoding="utf-8")
    whole, _, rest = text.rpartition("\n")
    if rest:
        path.write_text(f"{whole}\n" if whole else "", encoding="utf-8")
    lines = [json.loads(line) for line in whole.splitlines() if line]
    return {line["unit"]: line["record"] for line in lines}


def describe_kept(prepared: Prepared) -> str:
    """After an interruption: what the folder holds."""
    done = len(read_results(prepared.out))
    return f"{prepared.out} keeps {done} of {len(prepared.units)} units."


def run_units(
    evaluated: EvaluatedModel,
    task: EvaluationTask,
    units: list[Unit],
    out: Path,
    batch_tokens: int | None,
    progress: Progress,
) -> None:
    """Answer units in batches and write the records of each batch when it is done."""
    budget = batch_tokens or evaluated.batch_tokens
    mix = task.mixes_lengths and evaluated.mixes_lengths
    waiting = list(units)
    environment = describe_environment()
    began = time.perf_counter()
    with progress.phase(task.full_name, sum(unit.cost for unit in units)) as phase:
        while waiting:
            batch = next(batches_of(waiting, budget, mix))
            try:
                records = answer(evaluated, task, batch, budget, phase.advance)
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                if len(batch) > 1:
                    # smaller batches from here on
                    budget = max(batch[0].length, len(batch) * batch[0].length // 2)
                    continue
                records = [{"error": f"{batch[0].length} tokens do not fit into memory."}]
            keys = {unit.key for unit in batch}
            waiting = [unit for unit in waiting if unit.key not in keys]
            with (out / RESULTS).open("a", encoding="utf-8") as file:
                for unit, record in zip(batch, records, strict=True):
                    file.write(json.dumps(plain({"unit": unit.key, "record": record}), ensure_ascii=False) + "\n")
            began, before = time.perf_counter(), began
            add_cost(out, evaluated, sum(unit.rows * unit.length for unit in batch), began - before, environment)


def answer(
    evaluated: EvaluatedModel, task: EvaluationTask, batch: list[Unit], budget: int, advance: Advance
) -> list[Record]:
    """The records of a batch; what a model refuses, such as a length beyond its table, is a result, not a failure."""
    try:
        return task.answer(evaluated, batch, budget, advance)
    except ValueError as error:
        alike = [[unit for unit in batch if unit.length == length] for length in {unit.length for unit in batch}]
        if len(alike) > 1:
            # a unit that is too long must not cost the others their answers
            apart = {
                unit.key: record
                for same in alike
                for unit, record in zip(same, answer(evaluated, task, same, budget, advance), strict=True)
            }
            return [apart[unit.key] for unit in batch]
        advance(sum(unit.cost for unit in batch))
        return [{"error": str(error)}] * len(batch)


def add_cost(out: Path, evaluated: EvaluatedModel, tokens: int, seconds: float, environment: dict[str, Any]) -> None:
    """Add to the time and tokens spent so far, so that interrupted runs count too."""
    path = out / COST
    before: dict[str, Any] = {"seconds": 0.0, "tokens": 0, "peak_mib": None}
    if path.exists():
        before = json.loads(path.read_text())
    peak = before["peak_mib"]
    if evaluated.device.type == "cuda":
        peak = max(peak or 0.0, torch.cuda.max_memory_allocated(evaluated.device) / 2**20)
    write_json(
        path,
        {
            "seconds": before["seconds"] + seconds,
            "tokens": before["tokens"] + tokens,
            "peak_mib": peak,
            "environment": environment,
        },
    )


def rescore(out: Path | str) -> dict[str, Any]:
    """Make report.json of an evaluation from its results, without the model; returns what it holds."""
    out = Path(out)
    settings = read_settings(out)
    task = build_evaluation(settings["task"], settings["options"])
    task.check_scoring()
    results = read_results(out)
    good = [record for record in results.values() if "error" not in record]
    errors = sorted({record["error"] for record in results.values() if "error" in record})
    if not good:
        raise ValueError(
            f"The evaluation in {str(out)!r} has no results" + (f": {errors[0]}" if errors else " yet; run it first.")
        )
    report = asdict(task.report(good, settings))
    missing = settings["examples"]["units"] - len(results)
    if missing:
        report["notes"].insert(0, f"Not finished: {missing} of {settings['examples']['units']} units are missing.")
    for error in errors:
        count = sum(record.get("error") == error for record in results.values())
        report["notes"].append(f"{count} units could not be run: {error}")
    cost = json.loads((out / COST).read_text()) if (out / COST).exists() else {}
    content = plain(
        {
            **{key: settings[key] for key in ("task", "options", "examples", "model")},
            "idea": task.idea,
            "headline": task.headline,
            "higher_is_better": task.higher_is_better,
            "declared": [asdict(metric) for metric in task.metrics],
            **report,
            "cost": {key: cost.get(key) for key in ("seconds", "tokens", "peak_mib")},
            "environment": cost.get("environment") or describe_environment(),
        }
    )
    write_json(out / REPORT, content)
    return content


def read_other(folder: Path, mine: dict[str, Any]) -> dict[str, Any]:
    """The report of another model, which must be of the same evaluation."""
    path = Path(folder) / REPORT
    try:
        other = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"There is no report to show beside in {str(folder)!r} ({error}).") from None
    found = differences_between(other, mine)
    if found:
        raise ValueError(f"The evaluation in {str(folder)!r} cannot be compared with this one: {found[0]}.")
    return other
