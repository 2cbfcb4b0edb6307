"""Planning an extension, and refusing what cannot be done before any weight is read."""

import os
import shutil
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from ..adapt.finetune import describe_texts, read_data
from ..adapt.settings import EvalSettings, FinetuneSettings
from ..data.overlap import find_overlap
from ..data.text import HUB_PREFIX, find_files, read_documents
from ..data.tokens import TokenStore, build_tokens
from ..model import EquitapeConfig
from ..pretrained.adapting import name_of
from ..pretrained.loading import check_vocabulary, choose_device, tokenizer_of
from ..pretrained.methods import change_config
from ..pretrained.native import check_native
from ..pretrained.weights import read_config, read_source_config
from ..runs.files import plain, read_json
from ..runs.identity import Difference, check_folder, find_differences
from ..tasks.perplexity_by_length import name_sources
from ..training.settings import TrainSettings
from .columns import comparator_settings, list_comparators
from .estimates import Device
from .last_words import find_passages
from .plan import ExtensionPlan, Text, check_length, choose_recall, choose_rows, make_plan
from .proof import FEW_QUESTIONS, HARNESS, QUESTIONS, check_harness_task, harness_task, proof_tasks
from .settings import ExtendSettings, trains

EXTEND = "extend.json"
UNIMPORTANT = tuple(
    f"settings.{name}"
    for name in ("save", "compare", "measure", "tolerance", "retrieval_tolerance", "batch_tokens", "compile")
)
"""Settings that change neither the model nor a measurement of it, but for rounding."""
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
    plan: ExtensionPlan
    comparators: dict[str, ExtensionPlan]
    """The plans of the other columns, by their names."""
    tasks: dict[str, dict[str, Any]]
    notes: list[str]
    held_out: TokenStore
    """The first held-out text."""
    digests: dict[str, str]
    passages: list[dict[str, str]]
    """Whose last words lm-eval asks for."""

    def identity(self) -> dict[str, Any]:
        """What decides the results, as plain data."""
        base = {"name": name_of(self.base), "context": self.config.context, "encoding": self.config.encoding}
        settings, plan = self.settings.to_dict(), self.plan.identity()
        return plain({"base": base, "settings": settings, "data": self.digests, "plan": plan})


def prepare(base: str | Path, settings: ExtendSettings) -> Prepared:
    """Plan an extension and refuse what cannot be done, before any weight is read."""
    base = str(base)
    config = read_config(base)
    # before any text is read
    check_length(config, settings)
    read_documents((*settings.data, *settings.eval_data))
    check_texts(settings)
    check_harness_task(settings)
    tokenizer = tokenizer_of(base, settings.tokenizer)
    check_vocabulary(tokenizer, config.vocab_size)
    device = find_device()
    row_length, _ = choose_rows(config, settings, device)
    train = TrainSettings(steps=1, seed=settings.seed)
    course = course_of(settings, train, row_length, row_length, choose_recall(settings), bool(settings.whole_rows))
    course.check(settings.to)
    with join_processes().main_process_first():
        rows, _ = read_data(course, tokenizer, row_length)
        stores = [build_tokens(source, tokenizer) for source in settings.eval_data]
    text = Text(
        train=rows.report.tokens,
        longest=min(int(store.lengths.max()) for store in stores),
        joined=min(store.num_tokens for store in stores),
        documents=tuple(rows.store.lengths.tolist()),
    )
    plan = make_plan(config, settings, text, device)
    if settings.save == "native":
        check_native(read_source_config(base), change_config(config, plan.adapt))
    comparators, left_out = plan_comparators(config, settings, text, device)
    tasks, notes = proof_tasks(plan, settings, tokenizer)
    held_out = zip(name_sources(settings.eval_data), stores, strict=True)
    questions = QUESTIONS if device.kind == "cuda" else FEW_QUESTIONS
    passages = find_passages(stores[0], tokenizer, questions)
    asked, missing = harness_task(settings, questions, len(passages))
    if asked is not None:
        tasks[HARNESS] = asked
    overlaps = {name: find_overlap(rows.store, store) for name, store in held_out}
    notes = [*describe_texts(overlaps), *left_out, *notes, *missing]
    return Prepared(
        base=base,
        settings=settings,
        config=config,
        tokenizer=tokenizer,
        text=text,
        device=device,
        plan=plan,
        comparators=comparators,
        tasks=tasks,
        notes=notes,
        held_out=stores[0],
        passages=passages,
        digests={"train": rows.store.facts.digest, "held out": " ".join(store.facts.digest for store in stores)},
    )


def check_texts(settings: ExtendSettings) -> None:
    """Raise ValueError for a file that is trained on and measured, under whatever name or folder."""
    trained, measured = (
        {
            (file.resolve(), inside)
            for source in sources
            if not source.startswith(HUB_PREFIX)
            for files, inside in (find_files(source),)
            for file in files
        }
        for sources in (settings.data, settings.eval_data)
    )
    same = sorted(str(file / inside) for file, inside in trained & measured)
    if same:
        raise ValueError(
            f"{same[0]!r} is in data and in eval_data; a proof needs text that was not trained on. Name another text "
            f"for one of them."
        )


def plan_comparators(
    config: EquitapeConfig, settings: ExtendSettings, text: Text, device: Device
) -> tuple[dict[str, ExtensionPlan], list[str]]:
    """The plans of all comparators. Of "all", those that the base does not allow are left out, and notes say why."""
    plans: dict[str, ExtensionPlan] = {}
    refused: dict[str, list[str]] = {}
    for name in list_comparators(settings):
        try:
            plans[name] = make_plan(config, comparator_settings(name, settings, config.query_growth), text, device)
        except ValueError as error:
            if name in settings.compare:
                raise ValueError(f"{name} cannot be compared: {error}") from error
            refused.setdefault(str(error), []).append(name)
    return plans, [f"Not compared: {', '.join(names)}. {reason}" for reason, names in refused.items()]


def find_device() -> Device:
    """The accelerator, or the CPU where there is none."""
    kind = choose_device().type
    if kind == "cuda":
        return Device(kind=kind, memory=torch.cuda.get_device_properties(0).total_memory)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Device(kind=kind, memory=memory, cores=os.cpu_count() or 1)


def course_of(
    settings: ExtendSettings, train: TrainSettings, row_length: int, scored: int, recall: float, whole_rows: bool
) -> FinetuneSettings:
    """The settings of the fine-tuning run. scored: the length at which it scores held-out text itself."""
    name, source = next(iter(name_sources(settings.eval_data).items()))
    return FinetuneSettings(
        data=settings.data,
        train=train,
        row_length=row_length,
        whole_rows=whole_rows,
        recall=recall,
        tokenizer=settings.tokenizer,
        evaluation=EvalSettings(data={name: source}, lengths=(scored,), windows=SCORED_WINDOWS),
    )


def default_folder(base: str | Path, settings: ExtendSettings) -> Path:
    """Where an extension goes without --out."""
    return Path("runs") / "extend" / f"{name_of(base)}-{settings.to}"


def check_place(out: Path, settings: ExtendSettings, resume: bool) -> None:
    """Refuse a folder that holds something else by its settings, before any text is read."""

    def compare() -> list[Difference]:
        new = {"settings": plain(settings.to_dict())}
        return find_differences({"settings": read_identity(out).get("settings")}, new, UNIMPORTANT)

    check_folder(out, "extension", EXTEND, compare, resume=resume)


def check_out(prepared: Prepared, out: Path, resume: bool) -> None:
    """Refuse a folder that holds something else, and a disk without room for the result."""
    # a setting that differs explains whatever else does
    check_place(out, prepared.settings, resume=True)

    def compare() -> list[Difference]:
        return find_differences(read_identity(out), prepared.identity(), UNIMPORTANT)

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


def read_identity(out: Path) -> dict[str, Any]:
    """What decided the results in a folder."""
    found = read_json(out / EXTEND)
    if not isinstance(found, dict) or not isinstance(found.get("settings"), dict):
        raise ValueError(f"{out / EXTEND} is damaged; choose another directory.")
    return found


def bytes_on_disk(prepared: Prepared) -> int:
    """An estimate of what is written: checkpoints, all adapters, the whole model where asked for, and pages."""
    others = [plan.trained for name, plan in prepared.comparators.items() if trains(name)]
    trained = [prepared.plan.trained, *others]
    # float32 weights, and two averages of the optimizer; checkpoints go when a training is done
    training = 4 * (3 * CHECKPOINTS * max(trained) + sum(trained))
    whole = prepared.plan.parameters * 4 if prepared.settings.save != "adapter" else 0
    return training + whole + PAGES_BYTES


def join_processes() -> PartialState:
    """Meet the other processes of `accelerate launch`, if there are any. They wait while the first one measures."""
    return PartialState(cpu=not torch.accelerator.is_available(), timeout=PATIENCE)
