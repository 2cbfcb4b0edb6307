"""Run an evaluation in resumable units and write its report.

The folder of an evaluation holds

    settings.json    what decides the results; a run with other settings is refused here
    results.jsonl    one line per unit, written when it is done
    unfinished/      answers inside a unit that is not done, for tasks with long units
    cost.json        time, tokens and memory so far, and where it ran
    report.json      figures, protocol, notes, environment
    report.md        the same as text
    *.png            heat maps, curves and bars
"""

import json
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ..registry import counted
from ..runs.environment import describe_environment
from ..runs.files import plain, read_json, write_json
from ..runs.identity import Difference, check_folder, find_differences
from ..runs.lock import locked
from ..runs.progress import Progress
from ..tasks import build_evaluation
from ..tasks.decoding import batches_of
from ..tasks.evaluated_model import EvaluatedModel
from ..tasks.evaluation import Advance, EvaluationTask, Record, Unit

SETTINGS, RESULTS, REPORT = "settings.json", "results.jsonl", "report.json"
COST = "cost.json"
UNFINISHED = "unfinished"
FORMAT = 1
UNIMPORTANT = ("format", "model.name", "options.data", "options.filler", "examples.source")
"""Names and paths of data; only its digest, among the examples, matters."""
COMPARED = ("task", "options", "examples")
"""Settings that must be equal in compared evaluations."""


def evaluate(
    evaluated: EvaluatedModel,
    task: EvaluationTask,
    out: Path | str,
    *,
    resume: bool = False,
    batch_tokens: int | None = None,
    score: bool = True,
    ignored: Sequence[str] = (),
    console: Console | None = None,
) -> dict[str, Any]:
    """Run every unfinished unit of a task, and return the content of report.json.

    resume: continue the evaluation in the folder. batch_tokens: tokens per batch. Default: as many as fit in memory.
    score: False only writes the answers and returns the settings; `rescore` makes the report later.
    ignored: dotted names of settings that may differ from those in the folder.
    """
    prepared = prepare(evaluated, task, out, resume=resume, score=score, ignored=ignored)
    return run_prepared(prepared, batch_tokens=batch_tokens, progress=Progress(console))


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A prepared and checked evaluation."""

    evaluated: EvaluatedModel
    task: EvaluationTask
    out: Path
    units: list[Unit]
    settings: dict[str, Any]
    score: bool


def prepare(
    evaluated: EvaluatedModel,
    task: EvaluationTask,
    out: Path | str,
    *,
    resume: bool = False,
    score: bool = True,
    ignored: Sequence[str] = (),
) -> Prepared:
    """Make all examples and raise errors early. Writes nothing."""
    out = Path(out)
    if score:
        task.check_scoring()
    units = task.prepare(evaluated)
    settings = describe_settings(evaluated, task, units)
    check_folder(out, "evaluation", SETTINGS, lambda: differences(out, settings, ignored), resume=resume)
    return Prepared(evaluated=evaluated, task=task, out=out, units=units, settings=settings, score=score)


def run_prepared(
    prepared: Prepared, *, batch_tokens: int | None = None, progress: Progress | None = None
) -> dict[str, Any]:
    """`evaluate` after preparation. progress: shows units, and those that are kept from before."""
    progress = progress or Progress()
    with locked(prepared.out):
        write_json(prepared.out / SETTINGS, prepared.settings)
        done = {key for key, record in read_results(prepared.out).items() if "error" not in record}
        waiting = [unit for unit in prepared.units if unit.key not in done]
        if done:
            progress.console.print(
                f"Continuing: {len(done)} of {counted(len(prepared.units), 'unit')} are done.", highlight=False
            )
        prepared.task.unfinished = prepared.out / UNFINISHED
        run_units(prepared.evaluated, prepared.task, waiting, prepared.out, batch_tokens, progress)
        shutil.rmtree(prepared.task.unfinished, ignore_errors=True)
        return rescore(prepared.out) if prepared.score else prepared.settings


def describe_settings(evaluated: EvaluatedModel, task: EvaluationTask, units: list[Unit]) -> dict[str, Any]:
    """All settings that affect results."""
    content = {
        "format": FORMAT,
        "task": task.full_name,
        "options": task.settled_options(),
        "examples": {"units": len(units), **task.identity()},
        "model": evaluated.describe(),
        **evaluated.describe_inputs(),
        "digest": task.digest(),
    }
    return json.loads(json.dumps(plain(content)))


def check_out(out: Path, resume: bool) -> None:
    """Raise ValueError if the folder cannot take an evaluation. Needs no model, so it runs before loading one."""
    check_folder(out, "evaluation", SETTINGS, list, resume=resume)


def differences(out: Path, settings: dict[str, Any], ignored: Sequence[str] = ()) -> list[Difference]:
    """Settings that differ between an evaluation and the one in a folder, but for those with the ignored names."""
    old = read_settings(out)
    # older versions did not write these
    for name in ("config", "tokenizer", "digest"):
        old.setdefault(name, settings[name])
    return find_differences(old, settings, (*UNIMPORTANT, *ignored))


def differences_between(one: dict[str, Any], other: dict[str, Any]) -> list[Difference]:
    """Settings that differ between two reports, apart from the model."""
    old, new = ({key: each.get(key) for key in COMPARED} for each in (one, other))
    return find_differences(old, new, UNIMPORTANT)


def read_settings(out: Path) -> dict[str, Any]:
    """The settings that an evaluation was started with."""
    try:
        settings = json.loads((out / SETTINGS).read_text())
        if settings["format"] > FORMAT:
            raise ValueError(f"format {settings['format']} is from a later version")
        if not isinstance(settings["task"], str):
            raise TypeError("its task is not a name")
        for part, name in (("options", None), ("examples", "units"), ("model", "context")):
            if not isinstance(settings[part], dict) or (name is not None and name not in settings[part]):
                raise TypeError(f"its {part} are damaged")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{str(out)!r} has no readable evaluation ({error}).") from None
    return settings


def read_results(out: Path) -> dict[str, Record]:
    """Records by unit. Removes a truncated last line from the file."""
    path = out / RESULTS
    if not path.exists():
        return {}
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        # cut in place: a new file may not fit on a full disk
        os.truncate(path, whole)
    found: dict[str, Record] = {}
    for number, line in enumerate(content[:whole].split(b"\n"), 1):
        try:
            if line:
                entry = json.loads(line)
                found[entry["unit"]] = dict(entry["record"])
        except (ValueError, KeyError, TypeError):
            raise ValueError(
                f"Line {number} of {path} is damaged; delete that line to evaluate its unit again."
            ) from None
    return found


def describe_kept(prepared: Prepared) -> str:
    """After an interruption: what is kept."""
    done = len(read_results(prepared.out))
    return f"Kept {done} of {counted(len(prepared.units), 'unit')} in {prepared.out}."


def run_units(
    evaluated: EvaluatedModel,
    task: EvaluationTask,
    units: list[Unit],
    out: Path,
    batch_tokens: int | None,
    progress: Progress,
) -> None:
    """Answer units in batches and write the records of each batch when it is done."""
    batch_tokens = batch_tokens or evaluated.batch_tokens
    mix = task.mixes_lengths and evaluated.mixes_lengths
    waiting = list(units)
    environment = describe_environment()
    began = time.perf_counter()
    with progress.phase(task.full_name, sum(unit.cost for unit in units), main=True) as phase:
        while waiting:
            batch = next(batches_of(waiting, batch_tokens, mix))
            try:
                records = answer(evaluated, task, batch, batch_tokens, phase.advance)
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                if len(batch) > 1:
                    # smaller batches from here on
                    batch_tokens = max(batch[0].length, len(batch) * batch[0].length // 2)
                    continue
                records = [{"error": f"{batch[0].length} tokens do not fit in memory."}]
            keys = {unit.key for unit in batch}
            waiting = [unit for unit in waiting if unit.key not in keys]
            with (out / RESULTS).open("a", encoding="utf-8") as file:
                for unit, record in zip(batch, records, strict=True):
                    file.write(json.dumps(plain({"unit": unit.key, "record": record}), ensure_ascii=False) + "\n")
            began, before = time.perf_counter(), began
            add_cost(out, evaluated, sum(unit.rows * unit.length for unit in batch), began - before, environment)


def answer(
    evaluated: EvaluatedModel, task: EvaluationTask, batch: list[Unit], batch_tokens: int, advance: Advance
) -> list[Record]:
    """The records of a batch. A length that a model rejects is a result, not a failure."""
    try:
        return task.answer(evaluated, batch, batch_tokens, advance)
    except ValueError as error:
        alike = [[unit for unit in batch if unit.length == length] for length in {unit.length for unit in batch}]
        if len(alike) > 1:
            # a unit that is too long must not affect the others
            apart = {
                unit.key: record
                for same in alike
                for unit, record in zip(same, answer(evaluated, task, same, batch_tokens, advance), strict=True)
            }
            return [apart[unit.key] for unit in batch]
        advance(sum(unit.cost for unit in batch))
        return [{"error": str(error)}] * len(batch)


def add_cost(out: Path, evaluated: EvaluatedModel, tokens: int, seconds: float, environment: dict[str, Any]) -> None:
    """Add to the time and tokens spent so far, to include interrupted runs."""
    before = {"seconds": 0.0, "tokens": 0, "peak_mib": None, **read_cost(out)}
    peak = before["peak_mib"]
    if evaluated.device.type == "cuda":
        peak = max(peak or 0.0, torch.cuda.max_memory_allocated(evaluated.device) / 2**20)
    write_json(
        out / COST,
        {
            "seconds": before["seconds"] + seconds,
            "tokens": before["tokens"] + tokens,
            "peak_mib": peak,
            "environment": environment,
        },
    )


def read_cost(out: Path) -> dict[str, Any]:
    """The content of cost.json; empty if it is missing or damaged."""
    content = read_json(out / COST)
    return content if isinstance(content, dict) else {}


def rescore(out: Path | str) -> dict[str, Any]:
    """Make report.json from the stored results, without the model; returns its content."""
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
    missing = settings["examples"]["units"] - len(results)
    if missing < 0:
        raise ValueError(f"{out / RESULTS} also has results of another evaluation; delete the file, and run it again.")
    report = asdict(task.report(good, settings))
    if missing:
        report["notes"].insert(0, f"Unfinished: {missing} of {settings['examples']['units']} units are missing.")
    for error in errors:
        count = sum(record.get("error") == error for record in results.values())
        report["notes"].append(f"{counted(count, 'unit')} failed: {error}")
    damaged = settings["model"].get("not finite")
    if damaged:
        names = damaged[0] if len(damaged) == 1 else f"{damaged[0]} and {len(damaged) - 1} more"
        report["notes"].insert(
            0, f"The weights of the model have NaN or infinity ({names}), so its scores say nothing."
        )
    cost = read_cost(out)
    content = plain(
        {
            **{key: settings[key] for key in ("task", "options", "examples", "model")},
            "idea": task.idea,
            "headline": task.headline,
            "higher_is_better": task.higher_is_better,
            **report,
            "declared": report["declared"] or [asdict(metric) for metric in task.metrics],
            "cost": {key: cost.get(key) for key in ("seconds", "tokens", "peak_mib")},
            "environment": cost.get("environment") or describe_environment(),
        }
    )
    write_json(out / REPORT, content)
    return content


def read_other(folder: Path, mine: dict[str, Any]) -> dict[str, Any]:
    """The report of another model on the same evaluation."""
    path = Path(folder) / REPORT
    try:
        other = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"There is no report to compare with in {str(folder)!r} ({error}).") from None
    found = differences_between(other, mine)
    if found:
        raise ValueError(f"Cannot compare with the evaluation in {str(folder)!r}: {found[0]}.")
    return other
