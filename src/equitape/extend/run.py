"""An extension from its base to the verdict, in stages that a kill does not undo.

The folder of an extension holds

    extend.json                           what decides it; --resume refuses another
    original/, extended/, NAME/           evaluations of the models, one folder per task
    training/, NAME/training/             fine-tuning runs of `equitape adapt`
    agreement.json                        predictions of the models against the original's
    adapter.safetensors, adapter.json     the result, on top of the base
    model/                                the whole model, with --save model
    README.md                             the model card
    results.json, report.html, report.md  all figures, and the pages made from them
"""

import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from rich.console import Console

from ..adapt.finetune import describe_texts, finetune, read_data
from ..adapt.settings import EvalSettings, FinetuneSettings
from ..data.overlap import find_overlap
from ..data.text import find_files
from ..data.tokens import TokenStore, build_tokens
from ..evaluation import load_evaluated_model
from ..model import EquitapeConfig
from ..pretrained.adapter import DESCRIPTION, TENSORS
from ..pretrained.adapting import build, load_adapter, name_of, save_whole
from ..pretrained.card import CARD
from ..pretrained.loading import check_vocabulary, choose_device, tokenizer_of
from ..pretrained.weights import read_config
from ..registry import counted, describe_choices
from ..report.extension import extension_card, write_extension
from ..report.numbers import duration
from ..runs.environment import describe_environment
from ..runs.extension import EXTENDED, ORIGINAL, Agreement, Extension
from ..runs.files import make_directory, plain, read_json, write_json, write_text
from ..runs.identity import Difference, check_folder, find_differences
from ..runs.lock import locked
from ..tasks.evaluated_model import EvaluatedModel
from ..tasks.perplexity_by_length import name_sources
from ..training.fit import check_processes
from ..training.settings import TrainSettings
from .columns import comparator_settings, list_comparators
from .estimates import Device
from .plan import Plan, Text, choose_recall, choose_row_length, make_plan
from .proof import Reports, agree, judge, measure, proof_tasks
from .settings import UNTRAINED, ExtendSettings, split_comparator

EXTEND, RESULTS, AGREEMENT = "extend.json", "results.json", "agreement.json"
TRAINING, MODEL = "training", "model"
UNIMPORTANT = tuple(
    f"settings.{name}" for name in ("save", "compare", "measure", "tolerance", "retrieval_tolerance", "batch_tokens")
)
"""Settings that change neither the model nor a measurement of it."""
SCORED_WINDOWS = 4
"""Windows of held-out text that the training run itself scores; the proof scores more."""
PAGES_BYTES = 100 * 2**20
"""Room for reports, logs and plots."""
PATIENCE = timedelta(days=7)
"""How long processes wait for the first one, which measures models before and after they train."""
CHECKPOINTS = 3
"""Copies of weights and optimizer while training: two kept, one being written."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """An extension that is planned and checked; no weight was read yet."""

    base: str
    settings: ExtendSettings
    config: EquitapeConfig
    tokenizer: Any
    text: Text
    device: Device
    plan: Plan
    tasks: dict[str, dict[str, Any]]
    notes: list[str]
    held_out: TokenStore
    """The first held-out text."""
    digests: dict[str, str]

    def identity(self) -> dict[str, Any]:
        """What decides the results, as plain data."""
        given = {
            "base": {"name": name_of(self.base), "context": self.config.context, "encoding": self.config.encoding},
            "settings": self.settings.to_dict(),
            "data": self.digests,
            "plan": self.plan.identity(),
        }
        return plain(given)


def prepare(base: str | Path, settings: ExtendSettings) -> Prepared:
    """Plan an extension and refuse what cannot be done, before any weight is read."""
    base = str(base)
    config = read_config(base)
    if settings.to <= config.context:
        # before any text is read
        raise ValueError(
            f"The base reads {config.context:,} tokens already; give a length above that for --to, not {settings.to:,}."
        )
    for source in (*settings.data, *settings.eval_data):
        if not source.startswith("hf:"):
            find_files(source)
    tokenizer = tokenizer_of(base, settings.tokenizer)
    check_vocabulary(tokenizer, config.vocab_size)
    row_length = choose_row_length(config, settings)
    train = TrainSettings(steps=1, seed=settings.seed)
    course = course_of(settings, train, row_length, row_length, choose_recall(settings))
    course.check(settings.to)
    with join_processes().main_process_first():
        rows, _ = read_data(course, tokenizer, row_length)
        stores = [build_tokens(source, tokenizer) for source in settings.eval_data]
    text = Text(
        train=rows.report.tokens,
        longest=min(int(store.lengths.max()) for store in stores),
        joined=min(store.num_tokens for store in stores),
    )
    device = find_device()
    plan = make_plan(config, settings, text, device)
    for name in list_comparators(settings):
        make_plan(config, comparator_settings(name, settings), text, device)
    tasks, notes = proof_tasks(plan, settings, tokenizer)
    held_out = zip(name_sources(settings.eval_data), stores, strict=True)
    notes = [*describe_texts({name: find_overlap(rows.store, store) for name, store in held_out}), *notes]
    return Prepared(
        base=base,
        settings=settings,
        config=config,
        tokenizer=tokenizer,
        text=text,
        device=device,
        plan=plan,
        tasks=tasks,
        notes=notes,
        held_out=stores[0],
        digests={"train": rows.store.facts.digest, "held out": " ".join(store.facts.digest for store in stores)},
    )


def find_device() -> Device:
    """The accelerator, or the CPU where there is none."""
    kind = choose_device().type
    if kind == "cuda":
        return Device(kind=kind, memory=torch.cuda.get_device_properties(0).total_memory)
    return Device(kind=kind, memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def course_of(
    settings: ExtendSettings, train: TrainSettings, row_length: int, scored: int, recall: float
) -> FinetuneSettings:
    """The settings of the fine-tuning run. scored: the length at which it scores held-out text itself."""
    name, source = next(iter(name_sources(settings.eval_data).items()))
    return FinetuneSettings(
        data=settings.data,
        train=train,
        row_length=row_length,
        recall=recall,
        tokenizer=settings.tokenizer,
        evaluation=EvalSettings(data={name: source}, lengths=(scored,), windows=SCORED_WINDOWS),
    )


def default_folder(base: str | Path, settings: ExtendSettings) -> Path:
    """Where an extension goes without --out."""
    return Path("runs") / "extend" / f"{name_of(base)}-{settings.to}"


def check_out(prepared: Prepared, out: Path, resume: bool) -> None:
    """Refuse a folder that holds something else, and a disk without room for the result."""

    def compare() -> list[Difference]:
        old, new = read_json(out / EXTEND), prepared.identity()
        if not isinstance(old, dict):
            raise ValueError(f"{out / EXTEND} cannot be read; choose another directory.")
        # a setting that differs explains whatever else does
        chosen = find_differences({"settings": old.get("settings")}, {"settings": new["settings"]}, UNIMPORTANT)
        return chosen or find_differences(old, new, UNIMPORTANT)

    check_folder(out, "extension", EXTEND, compare, resume=resume)
    place = out.absolute()
    while not place.exists():
        place = place.parent
    needed, free = bytes_on_disk(prepared), shutil.disk_usage(place).free
    if needed > free:
        raise ValueError(
            f"The result needs about {needed / 2**30:.1f} GiB, checkpoints included, and the disk of {out} has "
            f"{free / 2**30:.1f} GiB left; free some space, or choose another folder with --out."
        )


def bytes_on_disk(prepared: Prepared) -> int:
    """An estimate of what is written: checkpoints, the adapter, the whole model where asked for, and pages."""
    plan = prepared.plan
    # float32 weights, and two averages of the optimizer
    training = plan.trained * 4 * (3 * CHECKPOINTS + 1)
    whole = plan.parameters * 4 if prepared.settings.save == "model" else 0
    return training + whole + PAGES_BYTES


def join_processes() -> PartialState:
    """Meet the other processes of `accelerate launch`, if there are any. They wait while the first one measures."""
    return PartialState(cpu=not torch.accelerator.is_available(), timeout=PATIENCE)


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
    with locked(out):
        write_json(out / EXTEND, prepared.identity())
        extension = Stages(prepared, out, console).run()
    processes.wait_for_everyone()
    return extension


def run_columns(prepared: Prepared, out: Path, names: Sequence[str], console: Console | None = None) -> None:
    """Do only these columns of the tables, so that several processes share an extension; `run` with resume ends it."""
    known = (ORIGINAL, EXTENDED, *list_comparators(prepared.settings))
    for name in names:
        if name not in known:
            raise ValueError(f"There is no column {name!r}.{describe_choices(name, known)}")
    check_out(prepared, out, resume=True)
    make_directory(out)
    if not (out / EXTEND).exists():
        write_json(out / EXTEND, prepared.identity())
    Stages(prepared, out, console).columns(names)


class Stages:
    """The stages of an extension in one folder. Each keeps what is done and continues from there."""

    def __init__(self, prepared: Prepared, out: Path, console: Console | None):
        self.prepared, self.out, self.console = prepared, out, console
        self.base, self.settings, self.plan = prepared.base, prepared.settings, prepared.plan
        self.agreements: dict[str, Agreement] = {}
        self.training: dict[str, Any] = {}
        self.dtype = "bfloat16" if prepared.device.kind == "cuda" else "float32"

    def run(self) -> Extension:
        """All stages."""
        reports = self.columns((ORIGINAL, EXTENDED, *list_comparators(self.settings)))
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
        )
        self.write(extension)
        return extension

    def help(self) -> None:
        """Train with the first process, which does all else."""
        self.train(self.plan, self.out / TRAINING)
        for name in list_comparators(self.settings):
            if split_comparator(name)[0] not in UNTRAINED:
                self.train(self.comparator_plan(name), self.out / name / TRAINING)

    def columns(self, names: Sequence[str]) -> dict[str, Reports]:
        """The reports of these models, without those whose training failed. Says how long the rest will take."""
        reports: dict[str, Reports] = {}
        seconds: dict[bool, float] = {}
        for index, name in enumerate(names):
            untrained = [split_comparator(other)[0] in (ORIGINAL, *UNTRAINED) for other in names[index:]]
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
            # the loaded model is not kept: training needs the memory
            return self.measure(ORIGINAL, lambda: self.evaluated(self.base, None, ORIGINAL))[0]
        if name != EXTENDED:
            self.say(f"Comparing with {name}.")
            return self.compare(name)
        self.say("Training.")
        self.training = self.train(self.plan, self.out / TRAINING)
        if self.training["status"] != "done":
            return None
        self.publish_adapter()
        self.say("Measuring the extended model.")
        return self.measure_other(EXTENDED, lambda: self.evaluated(str(self.out), self.base, EXTENDED))

    def say(self, sentence: str) -> None:
        """A line about what begins."""
        if self.console is not None:
            self.console.print(sentence, highlight=False)

    def evaluated(self, model: str, base: str | None, label: str) -> EvaluatedModel:
        """A model to measure; all models of the proof have one dtype."""
        return load_evaluated_model(model, base=base, tokenizer=self.settings.tokenizer, dtype=self.dtype, label=label)

    def train(self, plan: Plan, folder: Path) -> dict[str, Any]:
        """The fine-tuning run of a plan."""
        scored = max(1, min(plan.row_length, self.prepared.text.longest - 2))
        course = course_of(self.settings, plan.train, plan.row_length, scored, plan.recall)
        return finetune(self.base, plan.adapt, course, folder, resume=True, console=self.console)

    def publish_adapter(self) -> None:
        """Move the trained adapter to the top of the folder, its description last."""
        for name in (TENSORS, DESCRIPTION):
            if (self.out / TRAINING / name).exists():
                os.replace(self.out / TRAINING / name, self.out / name)

    def measure(self, name: str, load: Callable[[], EvaluatedModel]) -> tuple[Reports, EvaluatedModel | None]:
        """The reports of a model, and the model if it had to be loaded."""
        batch_tokens = self.settings.batch_tokens
        return measure(load, self.prepared.tasks, self.out / name, batch_tokens, self.console)

    def measure_other(self, name: str, load: Callable[[], EvaluatedModel]) -> Reports:
        """The reports of a model, and its agreement with the original."""
        reports, evaluated = self.measure(name, load)
        kept = self.out / name / AGREEMENT
        found = read_json(kept)
        if found is None and "agreement" not in self.settings.measure:
            return reports
        if found is None:
            evaluated = evaluated or load()
            original = self.evaluated(self.base, None, ORIGINAL)
            length = max(self.plan.short)
            found = agree(original.model, evaluated.model, self.prepared.held_out, length).to_dict()
            write_json(kept, found)
        self.agreements[name] = Agreement.from_dict(found)
        return reports

    def compare(self, name: str) -> Reports | None:
        """The reports of a comparator; None where its training failed."""
        plan = self.comparator_plan(name)
        if split_comparator(name)[0] in UNTRAINED:
            return self.measure_other(name, lambda: self.untrained(plan, name))
        folder = self.out / name / TRAINING
        if self.train(plan, folder)["status"] != "done":
            return None
        return self.measure_other(name, lambda: self.evaluated(str(folder), self.base, name))

    def comparator_plan(self, name: str) -> Plan:
        """The plan of a comparator."""
        settings = comparator_settings(name, self.settings)
        return make_plan(self.prepared.config, settings, self.prepared.text, self.prepared.device)

    def untrained(self, plan: Plan, name: str) -> EvaluatedModel:
        """The base with the positions of a plan."""
        model = build(self.base, plan.adapt, self.dtype).to(choose_device())
        return EvaluatedModel(model=model, tokenizer=self.prepared.tokenizer, name=name)

    def write(self, extension: Extension) -> None:
        """Card, pages, figures, and the whole model where asked for."""
        own = self.out / TRAINING / CARD
        if own.exists():
            write_text(self.out / CARD, extension_card(extension, own.read_text(encoding="utf-8")))
        if self.settings.save == "model" and extension.training["status"] == "done" and not self.has_model():
            folder = self.out / MODEL
            save_whole(load_adapter(self.base, self.out), self.prepared.tokenizer, folder)
            card = (folder / CARD).read_text(encoding="utf-8")
            write_text(folder / CARD, extension_card(extension, card))
        write_extension(extension, self.out)
        write_json(self.out / RESULTS, extension.to_dict())

    def has_model(self) -> bool:
        """Whether the whole model was written, its tokenizer included."""
        return (self.out / MODEL / "tokenizer_config.json").exists()
