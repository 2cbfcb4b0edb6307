"""Every encoding and seed of a recipe, trained and scored, and one results.json about all of them.

results.json, which reports are made from, is this dictionary (all of it plain JSON; null where a number is unknown):

    name           the recipe's name
    recipe         the whole resolved recipe, overrides applied; written to a file it is a recipe that repeats this run
    task           {name, idea, headline, higher_is_better, trained_length, tested_length};
                   headline names the metric to show first
    claims         {label: {metric: number}}, numbers others published for this task; claims, not measurements;
                   `claims_source` says whose
    claims_source  one line, or null
    environment    of the runs below, as text: {key: values joined by commas where they differ}
    runs           a list, in the order of the recipe: encodings outside, seeds inside; one dictionary a run:
        label            what reports call the encoding, unique to it ("tape", "tape, no carry")
        encoding         {kind, ...}, every option spelled out
        seed
        status           "done", "nan" (the loss stopped being a number), "failed", or "missing" (not run yet)
        note             one sentence where status is not "done", else ""
        parameters       number of weights
        steps            optimizer steps done
        trained_tokens   tokens seen, padding not counted
        seconds          of training steps, compiling included; evaluation, saving and start-up not counted
        tokens_per_second
        peak_mib         most memory held while training, on the GPU or, without one, by the process; null if unknown
        evaluate_seconds
        log              [[step, loss], ...], at most about 400 points, each the mean of the steps up to it
        evaluation       {metrics: {name: number}, heat_maps: [...], curves: [...]} as `tasks.base.Evaluation` has them;
                         null unless status is "done"
        environment      {equitape, torch, transformers, accelerate, python, device, processor, commit, date,
                         side_by_side}, null for a run not made (commit: null outside a git checkout, with "+changes"
                         behind it when files differ from it; date: when it began, UTC, ISO 8601; side_by_side: runs
                         that shared the machine at a time)

Metric names that contain "outside" are out of distribution, all others inside (see `tasks.base.Evaluation`).
"""

import gc
import os
import traceback
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape

from . import run
from .environment import join_environments
from .files import write_json, write_text
from .log import LOG
from .parallel import side_by_side
from .plan import Plan, make_plan
from .recipe import parse_recipe, resolved, to_yaml
from .run import describe_run, execute, explain, finished

RESULTS = "results.json"
RUNS = "runs"
ERROR = "error.txt"


def compare(plan: Plan, out_dir: Path, *, jobs: int = 1, console: Console | None = None) -> dict[str, Any]:
    """Make every run that is not made yet, continue one that was interrupted, and write results.json.

    A run that fails costs the others nothing; it is tried again the next time. jobs: processes that run side by side.
    """
    console = console or Console(quiet=True)
    check_directory(out_dir, plan)
    write_text(out_dir / run.RECIPE, to_yaml(plan.recipe))
    run.keep_digest(out_dir, plan.task)
    # one seed of everything before the second of anything: what is interrupted can be compared, and what one run has
    # compiled serves those of other seeds
    runs = sorted(plan.runs, key=lambda run: run[0].seeds.index(run[1]))
    waiting = [
        (choice.label, seed) for choice, seed in runs if finished(run_folder(out_dir, choice.label, seed)) is None
    ]
    if len(waiting) < len(runs):
        console.print(f"{len(runs) - len(waiting)} of {len(runs)} runs are done already.")

    def end(entry: dict[str, Any]) -> None:
        tell(console, plan, entry)
        write_json(out_dir / RESULTS, collect(plan, out_dir))

    jobs = min(jobs, len(waiting))
    if jobs > 1:
        console.print(f"{len(waiting)} runs, {jobs} side by side.")
        content = resolved(plan.recipe)
        arguments = {(label, seed): (content, label, seed, out_dir, jobs) for label, seed in waiting}
        logs = {(label, seed): run_folder(out_dir, label, seed) / LOG for label, seed in waiting}
        for (label, seed), entry in side_by_side(attempt_anew, arguments, jobs, logs, plan.recipe.train.steps, console):
            died = "Its process died; run the command again to continue."
            end(entry or describe_failure(plan, label, seed, died))
    else:
        for number, (label, seed) in enumerate(waiting):
            console.print(f"Run {number + 1} of {len(waiting)}: {escape(label)}, seed {seed}.")
            end(attempt(plan, label, seed, out_dir, console))
    results = collect(plan, out_dir)
    write_json(out_dir / RESULTS, results)
    left_out = runs_left_out(plan, out_dir)
    if left_out:
        names = escape(", ".join(left_out))
        console.print(f"Finished, but of encodings or seeds not asked for, and so not in the report: {names}.")
    return results


def runs_left_out(plan: Plan, out_dir: Path) -> list[str]:
    """Folders of finished runs that are not among those asked for."""
    asked = {run_folder(out_dir, choice.label, seed) for choice, seed in plan.runs}
    return sorted(folder.name for folder in (out_dir / RUNS).glob("*") if folder not in asked and finished(folder))


def check_directory(out_dir: Path, plan: Plan) -> None:
    """More encodings and seeds may be added to a comparison; all else must be as it was."""
    recipe = plan.recipe
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("compare is one process, with --jobs for more; start several processes of equitape train.")
    if (out_dir / LOG).exists():
        raise ValueError(f"{out_dir} holds a single run, of equitape train; choose another directory.")
    run.check_directory(out_dir, recipe, resume=True, varies=("encodings", "seeds"))
    run.check_data(out_dir, plan.task)
    for choice in recipe.choices:
        for seed in choice.seeds:
            folder = run_folder(out_dir, choice.label, seed)
            # one that failed before it began holds nothing but the reason
            if (folder / run.RECIPE).exists():
                run.check_directory(folder, run.single_run(recipe, choice.label, seed), resume=True)


def run_folder(out_dir: Path, label: str, seed: int) -> Path:
    """Where a run lives."""
    return out_dir / RUNS / run.folder_name(label, seed)


def attempt(
    plan: Plan, label: str, seed: int, out_dir: Path, console: Console | None = None, jobs: int = 1
) -> dict[str, Any]:
    """Make a run; an error becomes its result."""
    folder = run_folder(out_dir, label, seed)
    (folder / ERROR).unlink(missing_ok=True)
    try:
        entry = execute(plan, label, seed, folder, resume=True, console=console, side_by_side=jobs)
        assert entry is not None
        return entry
    except Exception as error:
        reason = explain(error, jobs)
        write_text(folder / ERROR, f"{reason}\n\n{traceback.format_exc()}")
        return describe_failure(plan, label, seed, reason)
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def describe_failure(plan: Plan, label: str, seed: int, reason: str) -> dict[str, Any]:
    """The entry of a run that failed."""
    return describe_run(plan, label, seed) | {"status": "failed", "note": reason}


def attempt_anew(content: dict[str, Any], label: str, seed: int, out_dir: Path, jobs: int) -> dict[str, Any]:
    """As `attempt`, in a process that knows only the recipe."""
    return attempt(make_plan(parse_recipe(content)), label, seed, out_dir, jobs=jobs)


def tell(console: Console, plan: Plan, entry: dict[str, Any]) -> None:
    """One line about a run that ended."""
    name = f"{escape(entry['label'])}, seed {entry['seed']}"
    if entry["status"] != "done":
        console.print(f"[red]{name}: {entry['status']}.[/red] {escape(entry['note'])}")
        return
    value = entry["evaluation"]["metrics"].get(plan.task.headline)
    console.print(
        f"{name}: {plan.task.headline} {'-' if value is None else format(value, '.4g')}, "
        f"{entry['seconds']:.0f} s of training, {entry['tokens_per_second']:,.0f} tokens/s."
    )


def collect(plan: Plan, out_dir: Path) -> dict[str, Any]:
    """results.json from what the runs left."""
    recipe, task = plan.recipe, plan.task
    entries = []
    for choice, seed in plan.runs:
        folder = run_folder(out_dir, choice.label, seed)
        entry = finished(folder)
        if entry is None:
            entry = describe_run(plan, choice.label, seed)
            if (folder / ERROR).exists():
                reason = (folder / ERROR).read_text().partition("\n")[0]
                entry = describe_failure(plan, choice.label, seed, reason)
        entries.append(entry)
    return {
        "name": recipe.name,
        "recipe": resolved(recipe),
        "task": {
            "name": task.name,
            "idea": task.idea,
            "headline": task.headline,
            "higher_is_better": task.higher_is_better,
            "trained_length": task.trained_length,
            "tested_length": task.tested_length,
        },
        "claims": recipe.claims,
        "claims_source": recipe.claims_source,
        "environment": join_environments([entry["environment"] for entry in entries if entry.get("environment")]),
        "runs": entries,
    }
