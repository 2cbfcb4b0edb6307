"""One run of a recipe: train one encoding with one seed, score it, write down what came out."""

import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from rich.console import Console
from torch import Tensor
from torch.nn.functional import pad

from ..model import EquitapeConfig, EquitapeForCausalLM
from ..tasks.base import IGNORED, Evaluation, Task
from ..values import parse_yaml
from . import checkpoints
from .bars import without_bars
from .environment import describe_environment
from .files import plain, write_json, write_text
from .fit import MODEL, fit, uses_bf16, uses_compiler
from .log import LOG, read_log, thin
from .plan import Plan
from .recipe import Recipe, parse_recipe, resolved, slug, spell_out, to_yaml
from .settings import TrainSettings
from .start import start_model

RUN = "run.json"
RECIPE = "recipe.yaml"
DATA = "data-digest.txt"
UNIMPORTANT = ("name", "description", "claims", "claims_source", "train.workers", "train.log_every", "train.save_every",
               "train.keep")  # fmt: skip
"""Parts of a recipe that change no loss and no score."""


@dataclass(frozen=True)
class PadTo:
    """Batches of one length, so that a compiled model is compiled once."""

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
    plan: Plan,
    label: str,
    seed: int,
    run_dir: Path,
    *,
    resume: bool = False,
    console: Console | None = None,
    side_by_side: int = 1,
) -> dict[str, Any] | None:
    """Train and score; returns the entry of results.json, which is also left in run.json beside the weights.

    side_by_side: how many runs share the machine, as the entry will say.
    With several processes all of them train, and one scores; the others get None.
    """
    recipe, task = plan.recipe, plan.task
    check_directory(run_dir, single_run(recipe, label, seed), resume)
    check_data(run_dir, task)
    done = finished(run_dir) if resume else None
    if done is not None:
        return done
    processes = PartialState(cpu=not torch.accelerator.is_available())
    processes.wait_for_everyone()
    if processes.is_main_process:
        write_text(run_dir / RECIPE, to_yaml(single_run(recipe, label, seed)))
        keep_digest(run_dir, task)
    choice = recipe.choose(label)
    settings = replace(recipe.train, seed=seed, jumps=choice.jumps)
    start = choice.start
    config = plan.configs[label]
    model = build_model(config, seed) if start is None else start_model(start, config)
    collate = PadTo(task.collate, task.trained_length, task.pad_token_id) if uses_compiler(settings) else task.collate

    def evaluate(model: Any, step: int) -> dict[str, float]:
        return score(model, task, seed, recipe.evaluation.share_while_training, settings).metrics

    entry = describe_run(plan, label, seed) | {
        "parameters": model.num_parameters(),
        "environment": describe_environment() | {"side_by_side": side_by_side},
    }
    result = fit(
        model,
        task.training_set(seed),
        settings,
        run_dir,
        collate=collate,
        evaluate=evaluate,
        resume=resume,
        console=console,
    )
    if not processes.is_main_process:
        return None
    lines = [line for line in read_log(run_dir / LOG) if "loss" in line]
    entry |= {
        "status": result.status,
        "note": result.note,
        "steps": result.steps,
        "trained_tokens": result.tokens,
        "seconds": result.seconds,
        "tokens_per_second": result.tokens_per_second,
        "peak_mib": result.peak_mib,
        "log": thin([(line["step"], line["loss"]) for line in lines]),
    }
    if result.status == "done":
        if hasattr(task, "tokenizer"):
            task.tokenizer.save_pretrained(run_dir / MODEL)
        if processes.num_processes > 1:
            # the model at hand may be one process's share of it
            with without_bars():
                model = EquitapeForCausalLM.from_pretrained(run_dir / MODEL).to(processes.device).eval()
        began = time.perf_counter()
        entry["evaluation"] = asdict(score(model, task, seed, recipe.evaluation.share, settings))
        entry["evaluate_seconds"] = time.perf_counter() - began
        # they served to resume, and there is nothing left to resume
        checkpoints.discard(run_dir)
    write_json(run_dir / RUN, entry)
    return plain(entry)


def lacks_memory(error: Exception) -> bool:
    """Whether a run failed for want of memory."""
    # beside others a process may not get room even to begin, for which torch has no class of its own
    return isinstance(error, torch.OutOfMemoryError) or "CUDA error: out of memory" in str(error)


def explain(error: Exception, side_by_side: int = 1) -> str:
    """Why a run failed, in a line."""
    if lacks_memory(error):
        fewer = f"fewer runs than {side_by_side} at a time (--jobs), " if side_by_side > 1 else ""
        return (
            f"Out of memory. Try {fewer}a larger train.accumulation or train.gradient_checkpointing=true; "
            "where the evaluation needed it, a smaller task.batch_tokens, if the task has it."
        )
    return f"{type(error).__name__}: {error}".splitlines()[0]


def build_model(config: EquitapeConfig, seed: int) -> EquitapeForCausalLM:
    """A new model; weights that all encodings have start the same for the same seed."""
    torch.manual_seed(seed)
    plain_config = EquitapeConfig(**{**config.to_dict(), "encoding": {"kind": "nope"}})
    shared = EquitapeForCausalLM(plain_config).state_dict()
    model = EquitapeForCausalLM(config)
    model.load_state_dict(shared, strict=False)
    return model


def score(model: Any, task: Task, seed: int, share: float, settings: TrainSettings) -> Evaluation:
    """Evaluate in the precision of training."""
    device = next(model.parameters()).device.type
    half = torch.autocast(device, torch.bfloat16) if uses_bf16(settings) else nullcontext()
    with torch.no_grad(), half:
        return task.evaluate(model, seed, share)


def describe_run(plan: Plan, label: str, seed: int) -> dict[str, Any]:
    """The entry of results.json for a run that has not been made."""
    return {
        "label": label,
        "encoding": plan.configs[label].encoding,
        "seed": seed,
        "status": "missing",
        "note": "This run has not been made yet.",
        "parameters": None,
        "steps": 0,
        "trained_tokens": 0,
        "seconds": None,
        "tokens_per_second": None,
        "peak_mib": None,
        "evaluate_seconds": None,
        "log": [],
        "evaluation": None,
        "environment": None,
    }


def finished(run_dir: Path) -> dict[str, Any] | None:
    """What run.json says of a run that needs no more work; None otherwise."""
    try:
        return json.loads((run_dir / RUN).read_text())
    except (OSError, ValueError):
        return None


def single_run(recipe: Recipe, label: str, seed: int) -> Recipe:
    """The recipe of one run alone."""
    choice = recipe.choose(label)
    begin: dict[str, Any] = {"start": choice.start} if choice.start is not None else dict(choice.encoding)
    if choice.jumps != recipe.train.jumps:
        begin["jumps"] = choice.jumps.to_dict() if choice.jumps is not None else None
    return replace(recipe, encodings=({**begin, "label": label, "seeds": [seed]},), seeds=(seed,))


def folder_name(label: str, seed: int) -> str:
    """What the directory of a run is called."""
    return f"{slug(label)}-seed{seed}"


def check_directory(directory: Path, recipe: Recipe, resume: bool, varies: tuple[str, ...] = ()) -> None:
    """Refuse a directory that holds another recipe's run, or anything but a run.

    varies: parts of the recipe in which what was run there before may differ.
    """
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"{directory} is a file; choose a directory.")
    if not directory.exists() or not any(directory.iterdir()):
        return
    if not (directory / RECIPE).exists():
        raise ValueError(f"{directory} is not empty and holds no run to continue; choose another directory.")
    differing = find_differences(directory / RECIPE, recipe, (*UNIMPORTANT, *varies))
    if differing:
        raise ValueError(
            f"{directory} holds a run of another recipe (they differ in {', '.join(differing)}); choose another "
            f"directory, or remove it."
        )
    if not resume:
        raise ValueError(f"{directory} holds this run already; continue it with --resume, or choose another directory.")


def check_data(directory: Path, task: Task) -> None:
    """Refuse to go on in a directory whose runs have read other data than the task would read now."""
    path = directory / DATA
    if task.data_digest is not None and path.exists() and path.read_text().strip() != task.data_digest:
        raise ValueError(
            f"{directory} holds runs on other data: what task.train or task.valid names has changed since. Choose "
            f"another directory, or remove it."
        )


def keep_digest(directory: Path, task: Task) -> None:
    """For `check_data`."""
    if task.data_digest is not None:
        write_text(directory / DATA, f"{task.data_digest}\n")


def find_differences(path: Path, recipe: Recipe, ignored: tuple[str, ...]) -> list[str]:
    """Settings in which the recipe in a file differs, as dotted names."""
    try:
        old = resolved(spell_out(parse_recipe(parse_yaml(path.read_text(), str(path)), str(path))))
    except (OSError, ValueError, AttributeError):
        return ["a recipe that cannot be read"]
    new = resolved(spell_out(recipe))
    found = []
    for key in {**old, **new}:
        first, second = old.get(key), new.get(key)
        if key in ignored or first == second:
            continue
        if isinstance(first, dict) and isinstance(second, dict):
            names = [f"{key}.{name}" for name in {**first, **second} if first.get(name) != second.get(name)]
            found += [name for name in names if name not in ignored]
        else:
            found.append(key)
    return found
