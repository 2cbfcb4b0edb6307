"""An extension from its base to the verdict, in stages that a kill does not undo.

The folder of an extension holds

    extend.json                           what decides it; --resume refuses another
    original/, extended/, NAME/           evaluations of the models, one folder per task
    training/, NAME/training/             fine-tuning runs of `equitape adapt`
    agreement.json                        predictions of the models against the original's
    adapter.safetensors, adapter.json     the result, on top of the base
    model/, native/                       the whole model, with --save model or --save native
    README.md                             the model card
    lm-eval/                              the task of lm-evaluation-harness made from the held-out text
    results.json, report.html, report.md  all figures, and the pages made from them
"""

import os
import shutil
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

from rich.console import Console

from ..adapt.finetune import finetune, read_finished, remove_checkpoints
from ..evaluation import load_evaluated_model
from ..pretrained.adapter import DESCRIPTION, TENSORS, read_description, read_tensors
from ..pretrained.adapting import build, load_adapter, name_of, save_whole
from ..pretrained.card import CARD, adapter_card, model_card, native_card
from ..pretrained.loading import choose_device
from ..pretrained.native import architecture_in, save_native
from ..pretrained.settings import adaptation_of
from ..pretrained.weights import not_finite
from ..registry import counted, describe_choices
from ..report.extension import extension_card, has_title, write_extension
from ..report.numbers import duration
from ..runs.environment import describe_environment
from ..runs.errors import first_line
from ..runs.extension import EXTENDED, ORIGINAL, Agreement, Extension
from ..runs.files import make_directory, plain, write_json, write_text
from ..runs.lock import locked
from ..tasks.evaluated_model import EvaluatedModel
from ..training.fit import check_processes
from .last_words import write_task
from .plan import ExtensionPlan
from .prepare import EXTEND, Prepared, check_out, course_of, join_processes
from .proof import AGREEMENT_WINDOWS, FEW_WINDOWS, HARNESS, Reports, agree, judge, measure
from .settings import Measure, trains

RESULTS, AGREEMENT = "results.json", "agreement.json"
TRAINING, MODEL, NATIVE = "training", "model", "native"


def run(prepared: Prepared, out: Path, *, resume: bool = False, console: Console | None = None) -> Extension:
    """Do everything that is not done yet; returns what results.json holds.

    Under `accelerate launch`, every process calls this with the same arguments: all train, the first one measures.
    """
    processes = join_processes()
    check_processes(prepared.plan.train, processes.num_processes)
    if not processes.is_main_process:
        Stages(prepared, out, None).help()
        processes.wait_for_everyone()
        return Extension.read(out / RESULTS)
    check_out(prepared, out, resume)
    stages = Stages(prepared, out, console)
    stages.read_base()
    with locked(out):
        write_json(out / EXTEND, prepared.identity())
        extension = stages.run()
    processes.wait_for_everyone()
    return extension


def run_columns(prepared: Prepared, out: Path, names: Sequence[str], console: Console | None = None) -> None:
    """Do only these columns of the tables, so that several processes share an extension; `run` with resume ends it."""
    known = (ORIGINAL, EXTENDED, *prepared.comparators)
    for name in names:
        if name not in known:
            raise ValueError(f"There is no column {name!r}.{describe_choices(name, known)}")
    check_out(prepared, out, resume=True)
    stages = Stages(prepared, out, console)
    stages.read_base()
    make_directory(out)
    if not (out / EXTEND).exists():
        write_json(out / EXTEND, prepared.identity())
    stages.columns(names)


class Stages:
    """The stages of an extension in one folder. Each keeps what is done and continues from there."""

    def __init__(self, prepared: Prepared, out: Path, console: Console | None):
        self.prepared, self.out, self.console = prepared, out, console
        self.base, self.settings, self.plan = prepared.base, prepared.settings, prepared.plan
        self.agreements: dict[str, Agreement] = {}
        self.training: dict[str, Any] = {}
        self.original: EvaluatedModel | None = None
        self.dtype = "bfloat16" if prepared.device.kind == "cuda" else "float32"

    def run(self) -> Extension:
        """All stages."""
        reports = self.columns((ORIGINAL, EXTENDED, *self.prepared.comparators))
        extension = Extension(
            base=name_of(self.base),
            base_path=self.base,
            folder=str(self.out),
            context=self.prepared.config.context,
            to=self.settings.to,
            settings=plain(self.settings.to_dict()),
            plan=[vars(choice) for choice in self.plan.choices],
            short=list(self.plan.short),
            verdict=judge(self.settings, self.prepared.config.context, self.plan.short, reports, self.training),
            reports=reports,
            agreements=self.agreements,
            training=self.training,
            notes=self.prepared.notes,
            environment=describe_environment(),
            chats=bool(getattr(self.prepared.tokenizer, "chat_template", None)),
        )
        self.write(extension)
        return extension

    def read_base(self) -> None:
        """Before the first file of a new folder is written: refuse a base whose weights are missing or damaged."""
        if (self.out / EXTEND).exists():
            return
        self.original = self.evaluated(self.base, None, ORIGINAL)
        damaged = not_finite(self.original.model)
        if damaged:
            raise ValueError(
                f"The base has NaN or infinity in {counted(len(damaged), 'weight')}, for example {damaged[0]!r}; get "
                f"its files again."
            )

    def help(self) -> None:
        """Train with the first process, which does all else."""
        self.train(self.plan, self.out / TRAINING)
        for name, plan in self.prepared.comparators.items():
            if trains(name):
                self.train(plan, self.training_folder(name))

    def columns(self, names: Sequence[str]) -> dict[str, Reports]:
        """The reports of these models, without those whose training failed. Says how long the rest will take."""
        reports: dict[str, Reports] = {}
        seconds: dict[bool, float] = {}
        for index, name in enumerate(names):
            untrained = [other == ORIGINAL or not trains(other) for other in names[index:]]
            if seconds and set(untrained) <= set(seconds):
                left = duration(sum(seconds[kind] for kind in untrained))
                self.say(f"About {left} left for {counted(len(untrained), 'more model')}.")
            began = time.monotonic()
            found = self.column(name)
            seconds[untrained[0]] = time.monotonic() - began
            if found is not None:
                reports[name] = found
        return reports

    def column(self, name: str) -> Reports | None:
        """The reports of a model by its name in the tables; None where its training failed."""
        if name == ORIGINAL:
            self.say("Measuring the original.")
            return self.measure(ORIGINAL, lambda: self.original or self.evaluated(self.base, None, ORIGINAL))[0]
        # training needs the memory
        self.original = None
        if name != EXTENDED:
            self.say(f"Comparing with {name}.")
            return self.compare(name)
        self.say("Training.")
        self.training = self.train_column(EXTENDED, self.plan)
        if self.training["status"] != "done":
            return None
        self.say("Measuring the extended model.")
        return self.measure_other(EXTENDED, lambda: self.evaluated(str(self.out), self.base, EXTENDED))

    def say(self, sentence: str) -> None:
        """A line about what begins."""
        if self.console is not None:
            self.console.print(sentence, highlight=False)

    def evaluated(self, model: str, base: str | None, label: str) -> EvaluatedModel:
        """A model to measure; all models of the proof have one dtype."""
        return load_evaluated_model(model, base=base, tokenizer=self.settings.tokenizer, dtype=self.dtype, label=label)

    def training_folder(self, name: str) -> Path:
        """Where a column's fine-tuning run is."""
        return self.out / TRAINING if name == EXTENDED else self.out / name / TRAINING

    def train_column(self, name: str, plan: ExtensionPlan) -> dict[str, Any]:
        """The fine-tuning run of a column. Measurements before its end are of a training whose results are gone."""
        folder = self.training_folder(name)
        finished = read_finished(folder) is not None
        if not finished:
            old = [self.out / name / task for task in get_args(Measure)]
            for path in [*old, self.out / MODEL, self.out / NATIVE] if name == EXTENDED else old:
                shutil.rmtree(path, ignore_errors=True)
            (self.out / name / AGREEMENT).unlink(missing_ok=True)
        found = self.train(plan, folder)
        if name == EXTENDED and found["status"] == "done":
            self.publish_adapter()
        if finished:
            check_adapter(self.out if name == EXTENDED else folder, folder)
        return found

    def train(self, plan: ExtensionPlan, folder: Path) -> dict[str, Any]:
        """The fine-tuning run of a plan. A finished one needs no model again."""
        finished = read_finished(folder)
        planned = {name: plan.identity()[name] for name in ("adapt", "train")}
        # how a training is compiled matters only until it ends
        if finished is not None and plain(planned) == {
            "adapt": finished["adapt"],
            "train": {**finished["train"], "compile": False},
        }:
            if join_processes().is_main_process:
                remove_checkpoints(folder)
            return finished
        scored = max(1, min(plan.row_length, self.prepared.text.longest - 2))
        course = course_of(self.settings, plan.train, plan.row_length, scored, plan.recall, plan.whole_rows)
        return finetune(self.base, plan.adapt, course, folder, resume=True, console=self.console)

    def publish_adapter(self) -> None:
        """Move the trained adapter to the top of the folder, its description last."""
        for name in (TENSORS, DESCRIPTION):
            if (self.out / TRAINING / name).exists():
                os.replace(self.out / TRAINING / name, self.out / name)

    def measure(self, name: str, load: Callable[[], EvaluatedModel]) -> tuple[Reports, EvaluatedModel | None]:
        """The reports of a model, and the model if it had to be loaded."""
        batch_tokens = self.settings.batch_tokens
        tasks = dict(self.prepared.tasks)
        if HARNESS in tasks and self.settings.harness is None:
            folder = write_task(self.prepared.passages, self.out / HARNESS)
            tasks[HARNESS] = {**tasks[HARNESS], "include_path": str(folder)}
        return measure(load, tasks, self.out / name, batch_tokens, self.console)

    def measure_other(self, name: str, load: Callable[[], EvaluatedModel]) -> Reports:
        """The reports of a model, and its agreement with the original."""
        reports, evaluated = self.measure(name, load)
        kept = self.out / name / AGREEMENT
        found = read_agreement(kept)
        if found is None and "agreement" in self.settings.measure:
            evaluated = evaluated or load()
            original = self.evaluated(self.base, None, ORIGINAL)
            length = max(self.plan.short)
            windows = AGREEMENT_WINDOWS if self.prepared.device.kind == "cuda" else FEW_WINDOWS
            found = agree(original.model, evaluated.model, self.prepared.held_out, length, windows)
            write_json(kept, found.to_dict())
        if found is not None:
            self.agreements[name] = found
        return reports

    def compare(self, name: str) -> Reports | None:
        """The reports of a comparator; None where its training failed."""
        plan = self.prepared.comparators[name]
        if not trains(name):
            return self.measure_other(name, lambda: self.untrained(plan, name))
        if self.train_column(name, plan)["status"] != "done":
            return None
        return self.measure_other(name, lambda: self.evaluated(str(self.training_folder(name)), self.base, name))

    def untrained(self, plan: ExtensionPlan, name: str) -> EvaluatedModel:
        """The base with the positions of a plan."""
        model = build(self.base, plan.adapt, self.dtype).to(choose_device())
        return EvaluatedModel(model=model, tokenizer=self.prepared.tokenizer, name=name)

    def write(self, extension: Extension) -> None:
        """Card, pages, figures, and the whole model where asked for."""
        if extension.training["status"] == "done":
            own = self.card(self.out / TRAINING / CARD, adapter_card)
            write_text(self.out / CARD, extension_card(extension, own))
            if self.settings.save != "adapter":
                self.write_whole(extension, self.settings.save)
        write_extension(extension, self.out)
        write_json(self.out / RESULTS, extension.to_dict())

    def write_whole(self, extension: Extension, form: str) -> None:
        """The whole model and its card, in a folder called by its form: model or native."""
        folder = self.out / form
        # the tokenizer is written last
        if not (folder / "tokenizer_config.json").exists():
            model = load_adapter(self.base, self.out)
            if form == NATIVE:
                save_native(self.base, model, self.prepared.tokenizer, folder)
            else:
                save_whole(model, self.prepared.tokenizer, folder)
        # a model that was there already may have the card of another verdict, or none
        make = partial(native_card, architecture=architecture_in(folder)) if form == NATIVE else model_card
        write_text(folder / CARD, extension_card(extension, self.card(folder / CARD, make), form))

    def card(self, path: Path, make: Callable[..., str]) -> str:
        """A model card; made again where the file is missing or damaged."""
        text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
        if has_title(text):
            return text
        model = load_adapter(self.base, self.out)
        return make(model, adaptation_of(model))


def read_agreement(path: Path) -> Agreement | None:
    """A kept agreement; None where there is none, or a damaged one."""
    try:
        return Agreement.read(path)
    except ValueError:
        return None


def check_adapter(folder: Path, training: Path) -> None:
    """Raise ValueError where the adapter of a finished training is missing or damaged; its figures may be there."""
    try:
        read_tensors(folder, read_description(folder))
    except ValueError as error:
        reason = first_line(error).partition(";")[0]
        raise ValueError(
            f"The trained weights are lost: {reason}. Delete {training}; then --resume trains and measures again."
        ) from None
