"""Train and score every encoding of a recipe with every seed, and write one results.json.

results.json holds a `runs.results.Comparison`, run.json in each run folder a `runs.results.RunResult`. Figures with
"outside" in their name are out of distribution, all others inside.
"""

import errno
import gc
import os
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape

from ..registry import counted
from ..runs.environment import join_environments
from ..runs.errors import is_disk_full
from ..runs.files import remove_partial, write_json, write_text
from ..runs.folders import RUNS
from ..runs.lock import locked
from ..runs.progress import Progress
from ..runs.results import FAILED, Comparison, RunResult
from ..tasks.base import describe_task
from . import checkpoints, run
from .checked import CheckedRecipe, check_recipe
from .log import LOG
from .parallel import side_by_side
from .recipe import Recipe, parse_recipe, resolved, to_yaml
from .run import describe_run, execute, explain, finished, tidy

RESULTS = "results.json"
ERROR = "error.txt"


def compare(checked: CheckedRecipe, out_dir: Path, *, jobs: int = 1, console: Console | None = None) -> Comparison:
    """Start missing runs, continue interrupted ones, and write results.json.

    A failed run does not stop the others; the next call repeats it. jobs: number of parallel processes.
    """
    with locked(out_dir):
        return _compare(checked, out_dir, jobs, console or Console(quiet=True))


def _compare(checked: CheckedRecipe, out_dir: Path, jobs: int, console: Console) -> Comparison:
    check_directory(out_dir, checked.recipe)
    run.check_data(out_dir, checked.task)
    remove_partial(out_dir)
    write_text(out_dir / run.RECIPE, to_yaml(checked.recipe))
    run.keep_digest(out_dir, checked.task)
    # the first seed of every encoding, then the second: an interrupted comparison is still readable, and other seeds
    # reuse the compiled code
    runs = sorted(checked.runs, key=lambda run: run[0].seeds.index(run[1]))
    waiting = []
    for choice, seed in runs:
        folder = run_folder(out_dir, choice.label, seed)
        ended = finished(folder)
        if ended is None:
            waiting.append((choice.label, seed))
        else:
            # a kill may have left its checkpoints and its lock
            with locked(folder):
                tidy(folder, ended)
    if len(waiting) < len(runs):
        console.print(f"Already done: {len(runs) - len(waiting)} of {counted(len(runs), 'run')}.")

    progress = Progress(console)

    def end(result: RunResult) -> None:
        progress.end_run()
        show_end(console, checked, result)
        write_json(out_dir / RESULTS, collect(checked, out_dir).to_dict())

    jobs = min(jobs, len(waiting))
    with progress.over_runs(len(waiting)):
        if jobs > 1:
            console.print(f"{len(waiting)} runs, {jobs} in parallel.")
            content = resolved(checked.recipe)
            arguments = {(label, seed): (content, label, seed, out_dir, jobs) for label, seed in waiting}
            logs = {(label, seed): run_folder(out_dir, label, seed) / LOG for label, seed in waiting}
            steps = checked.recipe.train.steps
            for (label, seed), result in side_by_side(attempt_anew, arguments, jobs, logs, steps, progress):
                died = "Its process died; run the command again to continue."
                end(result or describe_failure(checked, label, seed, died))
        else:
            for number, (label, seed) in enumerate(waiting):
                console.print(f"Run {number + 1} of {len(waiting)}: {escape(label)}, seed {seed}.")
                end(attempt(checked, label, seed, out_dir, progress))
    results = collect(checked, out_dir)
    write_json(out_dir / RESULTS, results.to_dict())
    left_out = runs_left_out(checked, out_dir)
    if left_out:
        names = escape(", ".join(left_out))
        console.print(f"Finished runs of other encodings or seeds are not in the report: {names}.")
    return results


def describe_kept(checked: CheckedRecipe, out_dir: Path) -> str:
    """One sentence about what an interrupted comparison has kept."""
    folders = [run_folder(out_dir, choice.label, seed) for choice, seed in checked.runs]
    ended = sum(finished(folder) is not None for folder in folders)
    begun = sum(finished(folder) is None and checkpoints.newest(folder) is not None for folder in folders)
    partly = f", and checkpoints of {begun} more" if begun else ""
    return f"Kept {ended} of {counted(len(folders), 'run')}{partly} in {out_dir}."


def runs_left_out(checked: CheckedRecipe, out_dir: Path) -> list[str]:
    """Folders of finished runs that this comparison does not include."""
    asked = {run_folder(out_dir, choice.label, seed) for choice, seed in checked.runs}
    return sorted(folder.name for folder in (out_dir / RUNS).glob("*") if folder not in asked and finished(folder))


def check_directory(out_dir: Path, recipe: Recipe) -> None:
    """Raise ValueError for the directory of a different comparison. Only encodings and seeds may be added."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("equitape compare starts its own processes (--jobs); use launchers with equitape train only.")
    if (out_dir / LOG).exists():
        raise ValueError(f"{out_dir} holds a single run of equitape train; choose another directory.")
    run.check_directory(out_dir, recipe, resume=True, varies=("encodings", "seeds"))
    for choice in recipe.choices:
        for seed in choice.seeds:
            folder = run_folder(out_dir, choice.label, seed)
            # a run that failed early has no recipe
            if (folder / run.RECIPE).exists():
                run.check_directory(folder, run.single_run(recipe, choice.label, seed), resume=True)


def run_folder(out_dir: Path, label: str, seed: int) -> Path:
    """The folder of a run."""
    return out_dir / RUNS / run.folder_name(label, seed)


def attempt(
    checked: CheckedRecipe, label: str, seed: int, out_dir: Path, progress: Progress | None = None, jobs: int = 1
) -> RunResult:
    """Execute a run; an error becomes its result."""
    folder = run_folder(out_dir, label, seed)
    (folder / ERROR).unlink(missing_ok=True)
    try:
        result = execute(checked, label, seed, folder, resume=True, progress=progress, side_by_side=jobs)
        assert result is not None
        return result
    except Exception as error:
        if is_disk_full(error):
            # no other run could be kept either; a plain error, since it may come from another process
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder)) from None
        reason = explain(error, jobs)
        write_text(folder / ERROR, f"{reason}\n\n{traceback.format_exc()}")
        return describe_failure(checked, label, seed, reason)
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def describe_failure(checked: CheckedRecipe, label: str, seed: int, reason: str) -> RunResult:
    """The result of a run that failed."""
    return replace(describe_run(checked, label, seed), status=FAILED, note=reason)


def attempt_anew(content: dict[str, Any], label: str, seed: int, out_dir: Path, jobs: int) -> RunResult:
    """`attempt` in a new process, which gets only the recipe."""
    return attempt(check_recipe(parse_recipe(content)), label, seed, out_dir, jobs=jobs)


def show_end(console: Console, checked: CheckedRecipe, result: RunResult) -> None:
    """Print one line about a finished run."""
    name = f"{escape(result.label)}, seed {result.seed}"
    if not result.done:
        console.print(f"[red]{name}: {result.status}.[/red] {escape(result.note)}")
        return
    value = result.metric(checked.task.headline)
    console.print(
        f"{name}: {checked.task.headline.replace('_', ' ')} {'-' if value is None else format(value, '.4g')}, "
        f"{result.seconds:.0f} s of training, {result.tokens_per_second:,.0f} tokens/s."
    )


def collect(checked: CheckedRecipe, out_dir: Path) -> Comparison:
    """The results of all runs, read from their folders."""
    recipe, task = checked.recipe, checked.task
    results = []
    for choice, seed in checked.runs:
        folder = run_folder(out_dir, choice.label, seed)
        result = finished(folder)
        if result is None:
            result = describe_run(checked, choice.label, seed)
            if (folder / ERROR).exists():
                reason = (folder / ERROR).read_text(encoding="utf-8").partition("\n")[0]
                result = describe_failure(checked, choice.label, seed, reason)
        if (result.label, result.seed) != (choice.label, seed):
            raise ValueError(
                f"{folder / run.RUN} is of {result.label}, seed {result.seed}; delete it to repeat the run."
            )
        results.append(result)
    return Comparison(
        name=recipe.name,
        recipe=resolved(recipe),
        task=describe_task(
            task, trained_length=task.trained_length, tested_length=task.tested_length, warning=task.warning
        ),
        claims=recipe.claims,
        claims_source=recipe.claims_source,
        environment=join_environments([result.environment for result in results if result.environment]),
        runs=results,
    )
