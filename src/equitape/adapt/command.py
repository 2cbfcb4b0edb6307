"""What `equitape adapt` does: convert, merge an adapter, or fine-tune."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from accelerate import PartialState
from rich.console import Console
from transformers.utils.logging import disable_progress_bar

from ..model import EquitapeForCausalLM
from ..pretrained.adaptation import adaptation_of
from ..pretrained.adapter import save_adapter
from ..pretrained.adapting import build, load_adapter
from ..pretrained.methods import AdaptSettings, summarize_training
from ..pretrained.vocabulary import tokenizer_of
from ..registry import describe_choices
from ..report.adaptation import write_loss
from ..runs.files import files_in
from ..training.log import LOG, read_log
from ..training.settings import TrainSettings
from .evaluation import EvalSettings
from .finetune import FinetuneSettings, finetune
from .show import show_model, show_results

SAVES = ("adapter", "model")
PLOT = "loss.png"
RATE_OF_ALL, RATE_OF_FEW = 2e-5, 2e-4
"""Learning rates where all weights train, as in the paper's context extension, and where few do."""


@dataclass(frozen=True, kw_only=True)
class AdaptCommand:
    """What was asked for; an option that was left out is None, here and in the dictionaries."""

    base: str
    adapt: dict[str, Any]
    finetune: dict[str, Any]
    train: dict[str, Any]
    evaluation: dict[str, Any]
    out: Path | None = None
    save: str | None = None
    adapter: Path | None = None
    dtype: str | None = None
    resume: bool = False


def given(options: dict[str, Any]) -> dict[str, Any]:
    """Without what was left out."""
    return {name: value for name, value in options.items() if value is not None}


def run(command: AdaptCommand, console: Console) -> dict[str, Any]:
    """Do it, show it, and return the figures with a `status`."""
    if command.save is not None and command.save not in SAVES:
        raise ValueError(f"A {command.save!r} cannot be saved.{describe_choices(command.save, SAVES)}")
    if not console.is_terminal:
        disable_progress_bar()
    if command.finetune["data"]:
        return _train(command, console)
    for_training = {**command.finetune, **command.train, "resume": command.resume or None, "tokenizer": None}
    refuse_given(for_training, "--", "is for training, which needs --data")
    refuse_given(command.evaluation, "--eval-", "is for training, which needs --data")
    if command.out is not None and command.out.exists() and (command.out.is_file() or any(command.out.iterdir())):
        raise ValueError(f"{str(command.out)!r} is no empty folder; choose a new one for --out.")
    if command.adapter is not None:
        refuse_given(command.adapt, "--", "was settled when the adapter was trained; leave it out")
        model = load_adapter(command.base, command.adapter, dtype=command.dtype or "auto")
    else:
        model = build(command.base, AdaptSettings.parse(given(command.adapt), "adapt"), command.dtype or "auto")
    show_model(model, console)
    if command.out is not None:
        _save(model, command, console)
    adaptation = adaptation_of(model)
    trained = summarize_training(model)
    return {
        "status": "done",
        "base": adaptation.base_name,
        "adapt": adaptation.settings.to_dict(),
        "trained": {**asdict(trained), "share": trained.share},
        "encoding": model.config.encoding,
        "context": model.config.context,
    }


def refuse_given(options: dict[str, Any], prefix: str, reason: str) -> None:
    """One sentence about the first option that is of no use here."""
    for name in given(options):
        raise ValueError(f"{prefix}{name.replace('_', '-')} {reason}.")


def _save(model: EquitapeForCausalLM, command: AdaptCommand, console: Console) -> None:
    assert command.out is not None
    if command.save == "adapter":
        save_adapter(model, command.out)
        console.print(f"The adapter is in {command.out}.", highlight=False)
        return
    try:
        tokenizer = tokenizer_of(command.base, command.finetune["tokenizer"])
    except ValueError:
        if command.finetune["tokenizer"] is not None:
            raise
        tokenizer = None
    save_whole(model, tokenizer, command.out)
    said = "" if tokenizer is not None else " The base has no tokenizer to go with it."
    console.print(f"The model is in {command.out}.{said}", highlight=False)


def save_whole(model: EquitapeForCausalLM, tokenizer: Any, folder: Path) -> None:
    """Model, card and tokenizer in one folder."""
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.model_max_length = model.config.max_position_embeddings
        with files_in(folder) as aside:
            tokenizer.save_pretrained(aside)


def _train(command: AdaptCommand, console: Console) -> dict[str, Any]:
    if command.out is None:
        raise ValueError("Training needs --out, the folder for the adapter and the log.")
    if command.adapter is not None:
        raise ValueError("--adapter is for saving a trained adapter as a whole model; leave out --data.")
    if command.dtype is not None:
        raise ValueError("--dtype is for saving a whole model; training has --precision.")
    settings = AdaptSettings.parse(given(command.adapt), "adapt")
    rate = RATE_OF_ALL if settings.plan.everything else RATE_OF_FEW
    defaults = {
        "batch_size": 8,
        "learning_rate": rate,
        "weight_decay": 0.0,
        "betas": (0.9, 0.95),
        "seed": settings.seed,
    }
    train = {**defaults, **given(command.train)}
    if train.get("steps") is None and train.get("tokens") is None:
        raise ValueError("Say how long to train: --steps or --tokens.")
    evaluation = given(command.evaluation)
    if evaluation.get("windows") == 0:
        # all of them
        evaluation["windows"] = None
    course = FinetuneSettings.parse(
        {
            **given(command.finetune),
            "train": TrainSettings.parse(train, "train"),
            "evaluation": EvalSettings.parse(evaluation, "evaluation"),
        },
        "adapt",
    )
    report = finetune(command.base, settings, course, command.out, resume=command.resume, console=console)
    if not PartialState().is_main_process:
        return report
    write_loss(read_log(command.out / LOG), command.out / PLOT, "tape" if settings.plan.tape else "rope")
    show_results(report, console)
    if report["status"] == "done":
        console.print(f"Adapter, log, plot and figures are in {command.out}.", highlight=False)
        if command.save == "model":
            whole = load_adapter(command.base, command.out)
            save_whole(whole, tokenizer_of(command.base, course.tokenizer), command.out / "model")
    return report


def read_pairs(texts: list[str] | None, option: str, as_yaml: bool = False) -> dict[str, Any] | None:
    """NAME=VALUE, each value as it stands or as YAML reads it."""
    if not texts:
        return None
    pairs = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not key or not equals or not value:
            raise ValueError(f"{option} {text!r} does not read as NAME=VALUE.")
        if key in pairs:
            raise ValueError(f"{option} names {key!r} twice.")
        pairs[key] = yaml.safe_load(value) if as_yaml else value
    return pairs


def read_lengths(text: str | None) -> list[int] | None:
    """Numbers with commas between them."""
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--eval-lengths {text!r} does not read as whole numbers with commas between them.") from None
