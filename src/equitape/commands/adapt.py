"""equitape adapt."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from ..adapt.settings import (
    RATE_OF_ALL,
    RATE_OF_FEW,
    RATE_OF_TAPE,
    TRAIN_DEFAULTS,
    EvalSettings,
    FinetuneSettings,
    train_defaults,
)
from ..pretrained.settings import AdaptSettings
from ..runs.files import check_writable
from ..settings import check_value
from ..training.settings import TrainSettings
from .options import AsJson, OptionsOf, keeping, print_json, takes_settings

if TYPE_CHECKING:
    from ..pretrained.adapting import AdaptedForCausalLM

PLOT = "loss.png"
Saved = Literal["adapter", "model", "native"]
TRAINING = OptionsOf(
    cls=TrainSettings,
    panel="Training",
    without=(
        "minutes", "final_rate", "betas", "epsilon", "max_grad_norm", "dataloader_num_workers", "seed", "logging_steps",
        "save_total_limit",
    ),
    defaults={
        **TRAIN_DEFAULTS,
        "learning_rate": f"{RATE_OF_ALL:g} if all weights train, {RATE_OF_TAPE:g} for tape, else {RATE_OF_FEW:g}",
    },
)  # fmt: skip
DATA = OptionsOf(cls=FinetuneSettings, panel="Training", without=("train", "evaluation"))
METHOD = OptionsOf(cls=AdaptSettings, panel="Method", names={"lora_targets": "lora-target"})
EVALUATION = OptionsOf(
    cls=EvalSettings, panel="Perplexity before and after", prefix="eval", defaults={"windows": "32; 0 means all"}
)


@takes_settings
def adapt(
    base: Annotated[
        str, typer.Argument(help="Base model: a folder with safetensors, a GGUF file, or a name on the Hub.")
    ],
    method: Annotated[dict[str, Any], METHOD],
    finetune: Annotated[dict[str, Any], DATA],
    train: Annotated[dict[str, Any], TRAINING],
    evaluation: Annotated[dict[str, Any], EVALUATION],
    out: Annotated[Path | None, typer.Option(help="Output folder. Without it, nothing is written.")] = None,
    save: Annotated[
        str | None,
        typer.Option(
            metavar="adapter|model|native",
            help="What to write: the trained tensors only; the full model with LoRA merged; or that in the base's own "
            "architecture, for programs that do not know this package. Default: the adapter with --data, else the "
            "model.",
        ),
    ] = None,
    adapter: Annotated[
        Path | None, typer.Option(help="Load this trained adapter onto the base and save both as one model.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(metavar="auto|float32|bfloat16", help="Dtype of a saved full model. Default: auto, the base's."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in the folder --out.", rich_help_panel="Training")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Check everything, measure one step, and show rows, memory and time, without training.",
            rich_help_panel="Training",
        ),
    ] = False,
    json: AsJson = False,
) -> None:
    """Convert or fine-tune a pretrained model: TAPE, LoRA, LongLoRA or another rotary base.

    Without --data, the command converts the model and shows what would train. An untrained converted model has the
    same outputs as its base. With --data, it trains on packed documents, measures perplexity before and after, and
    writes the adapter, the log, a loss plot and a model card to --out.

    On several devices: accelerate launch -m equitape adapt ...
    """
    console = Console(stderr=json)
    check_value(save, Saved | None, "--save")
    if finetune.get("data"):
        if out is None and not dry_run:
            raise ValueError("Training needs --out: the folder for the adapter and the log.")
        if adapter is not None:
            raise ValueError("--adapter saves a trained adapter and cannot be combined with --data; drop one of them.")
        if dtype is not None:
            raise ValueError("--dtype only applies to a saved model; for training, use --precision.")
        settings = AdaptSettings.parse(method, "adapt")
        course = course_of(settings, finetune, train, evaluation)
        if save == "native":
            check_saving(base, settings)
        if out is None or dry_run:
            report = show_dry_run(base, settings, course, console)
        else:
            report = run_training(base, settings, course, out, resume=resume, save=save, console=console)
    else:
        extra = {name: value for name, value in finetune.items() if name != "tokenizer"}
        refuse_options(DATA, extra, "only applies to training, which needs --data")
        refuse_options(TRAINING, train, "only applies to training, which needs --data")
        refuse_options(EVALUATION, evaluation, "only applies to training, which needs --data")
        for option, given in (("--resume", resume), ("--dry-run", dry_run)):
            if given:
                raise ValueError(f"{option} only applies to training, which needs --data.")
        for option, value in (("--save", save), ("--dtype", dtype), ("--tokenizer", finetune.get("tokenizer"))):
            if value is not None and out is None:
                raise ValueError(f"{option} only applies to what is written, which needs --out.")
            if value is not None and save == "adapter" and option != "--save":
                raise ValueError(f"{option} only applies to a full model; drop it, or use --save model.")
        if out is not None:
            check_writable(out)
            if out.exists() and any(out.iterdir()):
                raise ValueError(f"{str(out)!r} is not an empty folder; choose a new folder for --out.")
        if adapter is not None:
            refuse_options(METHOD, method, "was fixed when the adapter was trained; drop it")
        model = load(base, method, adapter, dtype or "auto")
        report = show(model, console)
        if out is not None:
            write(model, base, out, tokenizer=finetune.get("tokenizer"), save=save or "model", console=console)
    if json:
        print_json(report)
    if report["status"] != "done":
        raise typer.Exit(1)


def refuse_options(group: OptionsOf, given: dict[str, Any], reason: str) -> None:
    """Raise an error about the first option that has no effect here."""
    for name in given:
        raise ValueError(f"{group.option_name(name)} {reason}.")


def load(base: str, method: dict[str, Any], adapter: Path | None, dtype: str) -> "AdaptedForCausalLM":
    """The base model, converted by a method or with an adapter loaded."""
    from ..pretrained.adapting import build, load_adapter

    if adapter is not None:
        return load_adapter(base, adapter, dtype=dtype)
    return build(base, AdaptSettings.parse(method, "adapt"), dtype)


def show(model: "AdaptedForCausalLM", console: Console) -> dict[str, Any]:
    """Print a summary of the model and its trainable parameters; return it as plain data."""
    from dataclasses import asdict

    from ..adapt.show import show_model
    from ..pretrained.methods import summarize_training
    from ..pretrained.settings import adaptation_of

    show_model(model, console)
    adaptation, trained = adaptation_of(model), summarize_training(model)
    return {
        "status": "done",
        "base": adaptation.base_name,
        "adapt": adaptation.settings.to_dict(),
        "trained": {**asdict(trained), "share": trained.share},
        "encoding": model.config.encoding,
        "context": model.config.context,
    }


def write(
    model: "AdaptedForCausalLM", base: str, out: Path, *, tokenizer: str | None, save: str, console: Console
) -> None:
    """Save the adapter, or the full model with the base's tokenizer if it has one."""
    from ..pretrained.adapter import save_adapter
    from ..pretrained.loading import tokenizer_of

    if save == "adapter":
        save_adapter(model, out)
        console.print(f"Wrote the adapter to {out}.", highlight=False, markup=False)
        return
    try:
        found = tokenizer_of(base, tokenizer)
    except ValueError:
        if tokenizer is not None:
            raise
        found = None
    save_full(base, model, found, out, save)
    note = "" if found is not None else " The base has no tokenizer to copy."
    console.print(f"Wrote the model to {out}.{note}", highlight=False, markup=False)


def check_saving(base: str, settings: AdaptSettings) -> None:
    """Raise ValueError before training if the base's own architecture cannot hold the result."""
    from ..pretrained.methods import change_config
    from ..pretrained.native import check_native
    from ..pretrained.weights import read_config, read_source_config

    check_native(read_source_config(base), change_config(read_config(base), settings))


def save_full(base: str, model: "AdaptedForCausalLM", tokenizer: Any, out: Path, save: str) -> None:
    """Write the full model as one of this package, or in the base's own architecture."""
    from ..pretrained.adapting import save_whole
    from ..pretrained.native import save_native

    if save == "native":
        save_native(base, model, tokenizer, out)
    else:
        save_whole(model, tokenizer, out)


def course_of(
    settings: AdaptSettings, finetune: dict[str, Any], train: dict[str, Any], evaluation: dict[str, Any]
) -> FinetuneSettings:
    """The settings of a fine-tuning run, from the given options."""
    if not {"steps", "tokens"} & set(train):
        raise ValueError("Training needs a budget; give --steps or --tokens.")
    if evaluation.get("windows") == 0:
        evaluation = {**evaluation, "windows": None}
    parts = {
        "train": TrainSettings.parse({**train_defaults(settings), **train}, "train"),
        "evaluation": EvalSettings.parse(evaluation, "evaluation"),
    }
    return FinetuneSettings.parse({**finetune, **parts}, "adapt")


def show_dry_run(base: str, settings: AdaptSettings, course: FinetuneSettings, console: Console) -> dict[str, Any]:
    """Print what training would do and cost; the same as plain data."""
    from ..adapt.dry_run import dry_run
    from ..adapt.show import show_plan

    with keeping(lambda: "A dry run keeps nothing.", resume=False):
        plan = dry_run(base, settings, course, console=console)
    show_plan(plan, console)
    return plan


def run_training(
    base: str, settings: AdaptSettings, course: FinetuneSettings, out: Path, *, resume: bool, save: str | None,
    console: Console,
) -> dict[str, Any]:  # fmt: skip
    """Train, print the scores, and also write the full model if requested."""
    from accelerate import PartialState

    from ..adapt.finetune import describe_kept, finetune
    from ..adapt.show import show_results
    from ..pretrained.adapting import load_adapter
    from ..pretrained.loading import tokenizer_of
    from ..report.adaptation import write_loss
    from ..training.log import LOG, read_log

    with keeping(lambda: describe_kept(out), resume=True):
        report = finetune(base, settings, course, out, resume=resume, console=console)
        if not PartialState().is_main_process:
            return report
        write_loss(read_log(out / LOG), out / PLOT, "tape" if settings.effects.tape else "rope")
        show_results(report, console)
        if report["status"] == "done":
            console.print(f"Wrote adapter, log, plot and figures to {out}.", highlight=False, markup=False)
            if save in ("model", "native"):
                tokenizer = tokenizer_of(base, course.tokenizer)
                save_full(base, load_adapter(base, out), tokenizer, out / save, save)
                console.print(f"Wrote the whole model to {out / save}.", highlight=False, markup=False)
    return report
