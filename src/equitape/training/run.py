"""One run of a recipe: train one encoding with one seed, score it, and write run.json."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor
from torch.nn.functional import pad

from ..model import EquitapeConfig, EquitapeForCausalLM
from ..runs.environment import describe_environment
from ..runs.errors import is_out_of_memory, named_line
from ..runs.files import write_json, write_text
from ..runs.folders import RUNS, file_name
from ..runs.identity import Difference, check_folder, find_differences
from ..runs.lock import locked
from ..runs.progress import Progress
from ..runs.results import RunResult
from ..tasks.base import IGNORED, Evaluation, Task
from ..values import parse_yaml
from . import checkpoints
from .checked import CheckedRecipe, start_model
from .fit import MODEL, fit, uses_bf16, uses_compiler, without_bars
from .log import LOG, read_log, thin
from .recipe import Recipe, read_recipe, resolved, spell_out, to_yaml
from .settings import UNIMPORTANT, TrainSettings

RUN = "run.json"
RECIPE = "recipe.yaml"
DATA = "data-digest.txt"
IGNORED_DIFFERENCES = (
    "name", "description", "claims", "claims_source", *(f"train.{name}" for name in UNIMPORTANT)
)  # fmt: skip
"""Parts of a recipe that do not affect results."""


@dataclass(frozen=True)
class PadTo:
    """Pads batches to one length, so that the model is compiled once."""

    collate: Callable[[list[Any]], dict[str, Tensor]]
    length: int
    pad_token_id: int

    def __call__(self, examples: list[Any]) -> dict[str, Tensor]:
        batch = self.collate(examples)
        missing = self.length - batch["input_ids"].shape[1]
        if missing <= 0:
            return batch
        batch.setdefault("attention_mask", torch.ones_like(batch["input_ids"]))
        fill = {"input_ids": self.pad_token_id, "labels": IGNORED}
        return {name: pad(values, (0, missing), value=fill.get(name, 0)) for name, values in batch.items()}


def execute(
    checked: CheckedRecipe,
    label: str,
    seed: int,
    run_dir: Path,
    *,
    resume: bool = False,
    progress: Progress | None = None,
    side_by_side: int = 1,
) -> RunResult | None:
    """Train and score; returns the content of run.json.

    side_by_side: number of parallel runs on the machine, for the record. With several processes, all train and the main
    one scores; the others return None.
    """
    processes = PartialState(cpu=not torch.accelerator.is_available())
    main = processes.is_main_process
    shown = progress if main and progress is not None else Progress()
    with locked(run_dir) if main else nullcontext():
        return _execute(checked, label, seed, run_dir, resume, shown, side_by_side)


def _execute(
    checked: CheckedRecipe, label: str, seed: int, run_dir: Path, resume: bool, progress: Progress, side_by_side: int
) -> RunResult | None:
    processes = PartialState()
    recipe, task = checked.recipe, checked.task
    check_directory(run_dir, single_run(recipe, label, seed), resume)
    check_data(run_dir, task)
    ended = finished(run_dir) if resume else None
    if ended is not None:
        if processes.is_main_process:
            tidy(run_dir, ended)
        return ended
    processes.wait_for_everyone()
    if processes.is_main_process:
        write_text(run_dir / RECIPE, to_yaml(single_run(recipe, label, seed)))
        keep_digest(run_dir, task)
    choice, config = recipe.choose(label), checked.configs[label]
    settings = replace(recipe.train, seed=seed, jumps=choice.jumps)
    with progress.phase("loading the model"):
        model = build_model(config, seed) if choice.start is None else start_model(choice.start, config)
    collate = PadTo(task.collate, task.trained_length, task.pad_token_id) if uses_compiler(settings) else task.collate

    def evaluate(model: Any, step: int) -> dict[str, float]:
        return score(model, task, seed, recipe.evaluation.share_while_training, settings).metrics

    result = replace(
        describe_run(checked, label, seed),
        parameters=model.num_parameters(),
        environment=describe_environment() | {"side_by_side": side_by_side},
    )
    trained = fit(
        model,
        task.training_set(seed),
        settings,
        run_dir,
        collate=collate,
        evaluate=evaluate,
        resume=resume,
        progress=progress,
        row_length=task.trained_length,
    )
    if not processes.is_main_process:
        return None
    lines = [line for line in read_log(run_dir / LOG) if "loss" in line]
    result = replace(
        result,
        status=trained.status,
        note=trained.note,
        steps=trained.steps,
        trained_tokens=trained.tokens,
        seconds=trained.seconds,
        tokens_per_second=trained.tokens_per_second,
        peak_mib=trained.peak_mib,
        log=thin([(line["step"], line["loss"]) for line in lines]),
    )
    if result.done:
        if hasattr(task, "tokenizer"):
            task.tokenizer.save_pretrained(run_dir / MODEL)
        if processes.num_processes > 1:
            # a process may hold only a shard of the model
            with without_bars():
                model = EquitapeForCausalLM.from_pretrained(run_dir / MODEL).to(processes.device).eval()
        began = time.perf_counter()
        with progress.phase("scoring"):
            evaluation = score(model, task, seed, recipe.evaluation.share, settings)
        result = replace(result, evaluation=evaluation, evaluate_seconds=time.perf_counter() - began)
    write_json(run_dir / RUN, result.to_dict())
    tidy(run_dir, result)
    # as read from the file: NaN and infinity are None
    return RunResult.from_dict(result.to_dict())


def tidy(run_dir: Path, result: RunResult) -> None:
    """Delete the checkpoints of a finished run."""
    if result.done:
        checkpoints.discard(run_dir)


def describe_kept(run_dir: Path) -> str:
    """One sentence about what an interrupted run has kept."""
    checkpoint = checkpoints.newest(run_dir)
    if checkpoint is None:
        return "No checkpoint was written yet; the run will start from step 0."
    return f"Kept the checkpoint of step {checkpoints.step_of(checkpoint):,} in {run_dir}."


def explain(error: Exception, side_by_side: int) -> str:
    """Why a run failed, in one line."""
    return out_of_memory(side_by_side) if is_out_of_memory(error) else named_line(error)


def out_of_memory(side_by_side: int = 1) -> str:
    """What to do where so many runs at a time fill the memory."""
    fewer = f"fewer runs than {side_by_side} at a time (--jobs), " if side_by_side > 1 else ""
    return (
        f"Out of memory. Try {fewer}a larger train.gradient_accumulation_steps or train.gradient_checkpointing=true. "
        "In evaluation, try a smaller task.batch_tokens, if the task has that option."
    )


def build_model(config: EquitapeConfig, seed: int) -> EquitapeForCausalLM:
    """A new model. Weights shared by all encodings are initialized equally for equal seeds.

    Those that an encoding makes narrower (carried_frequencies) are not shared.
    """
    torch.manual_seed(seed)
    plain_config = EquitapeConfig(**{**config.to_dict(), "encoding": {"kind": "nope"}})
    shared = EquitapeForCausalLM(plain_config).state_dict()
    model = EquitapeForCausalLM(config)
    own = model.state_dict()
    fitting = {name: weight for name, weight in shared.items() if weight.shape == own[name].shape}
    model.load_state_dict(fitting, strict=False)
    return model


def score(model: Any, task: Task, seed: int, share: float, settings: TrainSettings) -> Evaluation:
    """Evaluate in training precision."""
    device = next(model.parameters()).device.type
    half = torch.autocast(device, torch.bfloat16) if uses_bf16(settings) else nullcontext()
    with torch.no_grad(), half:
        return task.evaluate(model, seed, share)


def describe_run(checked: CheckedRecipe, label: str, seed: int) -> RunResult:
    """The result of a run that has not started."""
    encoding = checked.configs[label].encoding
    assert isinstance(encoding, dict)
    return RunResult(label=label, encoding=encoding, seed=seed)


def finished(run_dir: Path) -> RunResult | None:
    """The result of a finished run; None otherwise. A damaged file is an error: the run would be trained again."""
    path = run_dir / RUN
    if not path.exists():
        return None
    try:
        result = RunResult.read(path)
    except ValueError:
        result = None
    if result is None or (result.done and result.evaluation is None):
        raise ValueError(f"{path} is damaged; delete it to repeat the run.")
    return result


def single_run(recipe: Recipe, label: str, seed: int) -> Recipe:
    """The recipe of a single run."""
    choice = recipe.choose(label)
    begin: dict[str, Any] = {"start": choice.start} if choice.start is not None else dict(choice.encoding)
    if choice.jumps != recipe.train.jumps:
        begin["jumps"] = choice.jumps.to_dict() if choice.jumps is not None else None
    return replace(recipe, encodings=({**begin, "label": label, "seeds": [seed]},), seeds=(seed,))


def folder_name(label: str, seed: int) -> str:
    """The directory name of a run."""
    return f"{file_name(label)}-seed{seed}"


def check_directory(directory: Path, recipe: Recipe, resume: bool, varies: tuple[str, ...] = ()) -> None:
    """Raise ValueError for a directory with another recipe's run, or with other files.

    varies: parts of the recipe that may differ.
    """
    if not varies and (directory / RUNS).is_dir():
        raise ValueError(f"{directory} holds a comparison of equitape compare; choose another directory.")
    ignored = (*IGNORED_DIFFERENCES, *varies)
    check_folder(directory, "run", RECIPE, lambda: differences(directory / RECIPE, recipe, ignored), resume=resume)


def differences(path: Path, recipe: Recipe, ignored: tuple[str, ...]) -> list[Difference]:
    """Settings that differ between a recipe and the one in a file."""
    try:
        old = resolved(spell_out(read_recipe(parse_yaml(path.read_text(encoding="utf-8"), str(path)), str(path))))
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"Cannot read {path} ({error}); choose another directory.") from None
    return find_differences(old, resolved(spell_out(recipe)), ignored)


def check_data(directory: Path, task: Task) -> None:
    """Raise ValueError if the data of the task has changed since the runs in a directory."""
    path = directory / DATA
    if task.data_digest is not None and path.exists() and path.read_text().strip() != task.data_digest:
        raise ValueError(
            f"{directory} holds runs on other data: the files of task.train or task.valid changed. Choose another "
            f"directory, or delete this one."
        )


def keep_digest(directory: Path, task: Task) -> None:
    """Write the data digest that `check_data` reads."""
    if task.data_digest is not None:
        write_text(directory / DATA, f"{task.data_digest}\n")
