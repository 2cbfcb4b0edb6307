"""A checked recipe: its task and model configurations. Every error that needs no training is raised here."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..encodings import build_encoding
from ..model import EquitapeConfig, EquitapeForCausalLM
from ..pretrained.families import translate_config
from ..pretrained.loading import check_vocabulary, is_adapter, load_model
from ..pretrained.weights import reading
from ..registry import counted
from ..runs.folders import model_folder
from ..tasks import Task, build_task
from .fit import count_steps, first_lengths
from .jumps import check_jumps
from .recipe import EncodingChoice, Recipe, spell_out


@dataclass(frozen=True)
class CheckedRecipe:
    """A recipe that passed all checks."""

    recipe: Recipe
    """With every option of its task and encodings filled in."""
    task: Task
    configs: dict[str, EquitapeConfig]
    """By label."""
    data: str
    """A sentence about the training data, or an empty string."""

    @property
    def runs(self) -> list[tuple[EncodingChoice, int]]:
        """Every encoding with each of its seeds, in recipe order."""
        return [(choice, seed) for choice in self.recipe.choices for seed in choice.seeds]


def check_recipe(recipe: Recipe) -> CheckedRecipe:
    """Build the task, and check every encoding against it and the model. Each error is one sentence."""
    if all(getattr(recipe.train, name) is None for name in ("steps", "tokens", "minutes")):
        raise ValueError("train has no budget; set one of steps, tokens and minutes.")
    options = {key: value for key, value in recipe.task.items() if key != "name"}
    try:
        task = build_task(recipe.task["name"], options)
        examples: Any = task.training_set(recipe.choices[0].seeds[0])
        # fail on unusable data before anything is written
        examples[0]
    except OSError as error:
        raise ValueError(f"Cannot read the data of task {recipe.task['name']!r}: {error}.") from None
    configs = {choice.label: build_config(recipe, task, choice) for choice in recipe.choices}
    return CheckedRecipe(spell_out(recipe), task, configs, getattr(examples, "summary", ""))


def build_config(recipe: Recipe, task: Task, choice: EncodingChoice) -> EquitapeConfig:
    """The model configuration with one of the encodings."""
    if choice.start is not None:
        config = start_config(choice.start, task.trained_length, task.tested_length)
        check_tokens(task, config, choice.start)
    else:
        sizes = recipe.model.to_dict()
        sizes.setdefault("max_position_embeddings", task.tested_length)
        sizes["trained_length"] = task.trained_length
        config = EquitapeConfig(
            **sizes,
            vocab_size=task.vocab_size,
            pad_token_id=task.pad_token_id,
            eos_token_id=task.eos_token_id,
            bos_token_id=task.bos_token_id,
            encoding=choice.encoding,
        )
    assert isinstance(config.encoding, dict)
    with torch.device("meta"):
        encoding = build_encoding(config.encoding, config.geometry)
    check_jumps(choice.jumps, [encoding])
    unknown = sorted(token for token in (choice.jumps.tokens if choice.jumps else ()) if token >= config.vocab_size)
    if unknown:
        raise ValueError(
            f"jumps of {choice.label!r} name the tokens {unknown}, but those of task {task.name!r} are 0 to "
            f"{config.vocab_size - 1}."
        )
    try:
        encoding.check_lengths(task.trained_length, task.tested_length)
    except ValueError as error:
        raise ValueError(
            f"Encoding {choice.label!r} does not fit task {task.name!r}: {error}, or shorten the task."
        ) from None
    return config


def check_tokens(task: Task, config: EquitapeConfig, start: str) -> None:
    """Raise ValueError if the checkpoint's vocabulary differs from the task's."""
    tokenizer = getattr(task, "tokenizer", None)
    if tokenizer is not None:
        check_vocabulary(tokenizer, config.vocab_size)
    elif task.vocab_size != config.vocab_size:
        raise ValueError(
            f"The checkpoint {start!r} has {config.vocab_size:,} tokens and task {task.name!r} has "
            f"{task.vocab_size:,}; start from a checkpoint trained on this task."
        )


def count_parameters(config: EquitapeConfig) -> int:
    """Number of parameters of a model, without building it."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in EquitapeForCausalLM(config).parameters())


def describe_checked(checked: CheckedRecipe) -> dict[str, Any]:
    """What running the recipe would do, as plain data."""
    recipe, task = checked.recipe, checked.task
    examples: Any = task.training_set(recipe.choices[0].seeds[0])
    if recipe.train.minutes is not None:
        budget = f"{recipe.train.minutes:g} minutes"
    else:
        steps = count_steps(recipe.train, examples)
        measured = first_lengths(examples)
        tokens = round(steps * recipe.train.batch_size * sum(measured) / len(measured))
        budget = f"{counted(steps, 'step')}, about {tokens:,} tokens"
    evaluation = f"{recipe.evaluation.share:.0%} of the task's after training"
    if recipe.train.eval_steps:
        evaluation += f", {recipe.evaluation.share_while_training:.0%} every {recipe.train.eval_steps:,} steps"
    return {
        "task": task.name,
        "trained_length": task.trained_length,
        "tested_length": task.tested_length,
        "budget": budget,
        "batch_size": recipe.train.batch_size,
        "data": checked.data,
        "evaluation": evaluation,
        "encodings": {
            choice.label: {"parameters": count_parameters(checked.configs[choice.label]), "seeds": list(choice.seeds)}
            for choice in recipe.choices
        },
    }


def start_config(start: str, trained: int, tested: int) -> EquitapeConfig:
    """The configuration of a checkpoint as an `EquitapeConfig`, for the lengths of the task."""
    from transformers import AutoConfig

    folder = model_folder(start)
    if is_adapter(start):
        raise ValueError(
            f"{start!r} is an adapter; first save it as a full model with equitape adapt BASE --adapter {start} "
            f"--out FOLDER."
        )
    if not (Path(folder).expanduser() / "config.json").is_file():
        raise ValueError(f"There is no checkpoint to start from at {start!r}; give the folder of a saved model or run.")
    with reading(start):
        found = AutoConfig.from_pretrained(folder)
    config = translate_config(found)
    config.extend(trained, room=tested)
    return config


def start_model(start: str, config: EquitapeConfig) -> EquitapeForCausalLM:
    """The checkpoint in float32, with all weights trainable."""
    model: Any = load_model(start, "float32")
    model.config.max_position_embeddings = config.max_position_embeddings
    model.config.trained_length = config.trained_length
    return model.requires_grad_(True)
