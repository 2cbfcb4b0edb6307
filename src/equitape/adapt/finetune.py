"""Fine-tuning: train an adapted model on packed documents, score it before and after, and write an adapter.

A run folder holds

    run.json           settings that affect the result; --resume requires the same
    before.json        perplexities at the start
    log.jsonl          one line per step
    checkpoints/       trained tensors and optimizer, until the run ends
    adapter.safetensors, adapter.json, README.md
    loss.png
    results.json       all figures
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import PartialState
from rich.console import Console
from torch import Tensor

from ..data.overlap import Overlap, describe_overlap, find_overlap
from ..data.packing import PackedDataset, collate_rows
from ..data.recall import RecallRows
from ..data.text import read_documents, short_names
from ..data.tokens import TokenStore, build_tokens
from ..model import EquitapeForCausalLM
from ..pretrained.adapter import DESCRIPTION, TENSORS, complete_architecture, save_adapter, trained_tensors
from ..pretrained.adapting import AdaptedForCausalLM, build
from ..pretrained.loading import check_vocabulary, tokenizer_of
from ..pretrained.lora import lora_layers
from ..pretrained.methods import summarize_training
from ..pretrained.settings import Adaptation, AdaptSettings, adaptation_of
from ..runs.environment import describe_environment
from ..runs.files import plain, read_json, write_json
from ..runs.identity import Difference, check_folder, find_differences
from ..runs.lock import locked
from ..runs.progress import Progress
from ..training import checkpoints
from ..training.fit import MODEL, FitResult, check_processes, fit, shards_weights, uses_bf16
from ..training.run import describe_kept as describe_checkpoint
from ..training.settings import UNIMPORTANT, current_names
from .evaluation import TRAINED_ON, check_lengths, is_current, join_scores, score
from .settings import FinetuneSettings

RUN, BEFORE, RESULTS = "run.json", "before.json", "results.json"


def finetune(
    base: str | Path,
    adapt_settings: AdaptSettings,
    settings: FinetuneSettings,
    out: Path,
    *,
    resume: bool = False,
    console: Console | None = None,
) -> dict[str, Any]:
    """Adapt a base, train it, score it, and write everything to a folder. Returns the content of results.json.

    With `resume`, an interrupted run continues from its last checkpoint, without losing or repeating a step. Under
    `accelerate launch`, every process calls this with the same arguments.
    """
    processes = PartialState(cpu=not torch.accelerator.is_available())
    check_processes(settings.train, processes.num_processes)
    if not resume and processes.is_main_process:
        check_folder(out, "run", RUN, list, resume=False)
    tokenizer = check_sources(base, settings)
    progress = Progress(console if processes.is_main_process else None)
    with locked(out) if processes.is_main_process else nullcontext():
        return _finetune(base, adapt_settings, settings, out, tokenizer, resume, progress)


def _finetune(
    base: str | Path,
    adapt_settings: AdaptSettings,
    settings: FinetuneSettings,
    out: Path,
    tokenizer: Any,
    resume: bool,
    progress: Progress,
) -> dict[str, Any]:
    processes = PartialState()
    prepared = prepare(base, adapt_settings, settings, tokenizer, progress)
    model, rows, texts, warnings, context, lengths, bf16 = prepared
    adaptation = adaptation_of(model)
    identity = describe_run(adaptation, settings, rows, texts, lengths)
    if processes.is_main_process:
        # only the first process, which begins to write then
        check_folder(out, "run", RUN, lambda: differences(out, identity), resume=resume)
    finished = read_finished(out) if resume else None
    if finished is not None:
        for name in (DESCRIPTION, TENSORS):
            if not (out / name).is_file():
                raise ValueError(f"The run in {out} is finished, but {name} is gone; delete {RESULTS} to train again.")
        if processes.is_main_process:
            remove_checkpoints(out)
            progress.console.print(f"The run in {out} is already finished.", highlight=False, markup=False)
        return finished
    if processes.is_main_process:
        write_json(out / RUN, identity)

    def evaluate(model: Any, when: str) -> list[dict[str, Any]]:
        with progress.phase(f"scoring {when} training") as phase:

            def show(what: str, done: int, of: int) -> None:
                phase.update(done, f"perplexity of {what}", of)

            return score(model, texts, settings.evaluation, lengths, bf16, show)

    def evaluate_while_training(model: Any, step: int) -> dict[str, float]:
        found = score(model, texts, settings.evaluation, lengths, bf16)
        return {name_score(entry): entry["perplexity"] for entry in found}

    model.to(processes.device)
    before = read_json(out / BEFORE)
    if not is_current(before, texts, lengths):
        before = evaluate(model, "before")
        if processes.is_main_process:
            write_json(out / BEFORE, before)

    given = RecallRows(rows, tokenizer, settings.recall, settings.train.seed) if settings.recall > 0 else rows
    with only_trained_in_checkpoints(model):
        result = fit(
            model,
            given,
            settings.train,
            out,
            collate=collate_rows,
            evaluate=evaluate_while_training,
            resume=resume,
            progress=progress,
        )
    after = evaluate(model, "after") if result.status == "done" else None
    scores = join_scores(before, after)
    report = describe_results(model, adaptation, settings, rows, result, scores, context, warnings)
    trained = trained_tensors(model)
    if processes.is_main_process:
        write_run(model, trained, out, report)
    processes.wait_for_everyone()
    return report


class Prepared(NamedTuple):
    """What a fine-tuning run starts from."""

    model: AdaptedForCausalLM
    rows: PackedDataset
    texts: dict[str, TokenStore]
    """To score, by name."""
    warnings: list[str]
    context: int
    lengths: tuple[int, ...]
    """To score at."""
    bf16: bool


def check_sources(base: str | Path, settings: FinetuneSettings) -> Any:
    """Refuse missing data before any work; returns the tokenizer."""
    read_documents((*settings.data, *settings.evaluation.data.values()))
    return tokenizer_of(base, settings.tokenizer)


def prepare(
    base: str | Path, adapt_settings: AdaptSettings, settings: FinetuneSettings, tokenizer: Any, progress: Progress
) -> Prepared:
    """Load the model, tokenize, and refuse what does not fit together."""
    bf16 = uses_bf16(settings.train)
    with progress.phase("loading the model"):
        # a sharded block has one dtype
        model = build(base, adapt_settings, torch.bfloat16 if bf16 and not shards_weights() else torch.float32)
    widen_trained(model)
    context = adapt_settings.context or model.config.context
    settings.check(context)
    check_vocabulary(tokenizer, model.config.vocab_size)
    with PartialState().main_process_first(), progress.phase("tokenizing"):
        rows, texts = read_data(settings, tokenizer, settings.rows(context))
    lengths = settings.evaluation.lengths or (context,)
    check_lengths(texts, lengths)
    progress.console.print(f"Training data: {rows.summary}", highlight=False, markup=False)
    with progress.phase("comparing the texts"):
        overlaps = {name: find_overlap(rows.store, store) for name, store in texts.items() if name != TRAINED_ON}
    warnings = describe_texts(overlaps)
    for sentence in warnings:
        progress.console.print(f"Warning: {sentence}", highlight=False, markup=False)
    return Prepared(model, rows, texts, warnings, context, lengths, bf16)


def widen_trained(model: EquitapeForCausalLM) -> None:
    """Keep trained tensors in float32: bfloat16 loses small updates. Frozen tensors keep their dtype."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.float32)
    for _, layer in lora_layers(model):
        # peft would cast the inputs to float32, and autocast would cast them back
        layer.cast_input_dtype_enabled = False


def read_data(settings: FinetuneSettings, tokenizer: Any, length: int) -> tuple[PackedDataset, dict[str, TokenStore]]:
    """Training rows, and the texts to score by name."""
    store = build_tokens(settings.data, tokenizer, settings.cache)
    rows = PackedDataset(
        store,
        length,
        seed=settings.train.seed,
        min_tokens=settings.min_tokens,
        drop_remainders=settings.whole_rows,
    )
    if rows.report.tokens < length:
        raise ValueError(
            f"The data has {rows.report.tokens:,} tokens, too few for one row of {length:,}; give more text, or "
            f"shorter rows with row_length or the context."
        )
    texts = {name: build_tokens(source, tokenizer, settings.cache) for name, source in settings.evaluation.data.items()}
    return rows, texts or {TRAINED_ON: store}


def describe_texts(overlaps: dict[str, Overlap]) -> list[str]:
    """Warnings about scored texts that were trained on. overlaps: of each text; empty if no text was given."""
    if not overlaps:
        return [
            "No text to score was given, so perplexity is that of the training data; give another with --eval-data."
        ]
    return [note for name, found in overlaps.items() if (note := describe_overlap(name, found))]


def describe_run(
    adaptation: Adaptation,
    settings: FinetuneSettings,
    rows: PackedDataset,
    texts: dict[str, TokenStore],
    lengths: tuple[int, ...],
) -> dict[str, Any]:
    """All settings that affect the trained weights and their scores."""
    train = {key: value for key, value in settings.train.to_dict().items() if key not in UNIMPORTANT}
    content = {
        "adapt": adaptation.settings.to_dict(),
        "base": adaptation.base,
        "data": {"digest": rows.store.facts.digest, **asdict(rows.report)},
        "train": train,
        "recall": settings.recall or None,
        "evaluation": {
            "data": {name: store.facts.digest for name, store in texts.items()},
            "lengths": lengths,
            "stride": settings.evaluation.stride,
            "windows": settings.evaluation.windows,
        },
    }
    return json.loads(json.dumps(plain(content)))


def differences(out: Path, identity: dict[str, Any]) -> list[Difference]:
    """Settings that differ between a run and the one in a folder."""
    old = read_json(out / RUN)
    try:
        if "architecture" in old.get("base", {}):
            # older versions did not write every field
            known = identity.get("base", {}).get("architecture", {})
            old["base"]["architecture"] = {**known, **complete_architecture(old["base"]["architecture"])}
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ValueError(f"Cannot read {out / RUN}; choose another folder.") from None
    if isinstance(old.get("train"), dict):
        train = current_names(old["train"])
        old = {**old, "train": {key: value for key, value in train.items() if key not in UNIMPORTANT}}
    # older versions did not write it
    return find_differences({"evaluation": identity.get("evaluation"), **old}, identity)


@contextmanager
def only_trained_in_checkpoints(model: AdaptedForCausalLM) -> Iterator[None]:
    """Save only trained tensors in checkpoints; the base does not change."""
    model.saves_trained_only = True
    try:
        yield
    finally:
        model.saves_trained_only = False


def describe_results(
    model: EquitapeForCausalLM,
    adaptation: Adaptation,
    settings: FinetuneSettings,
    rows: PackedDataset,
    result: FitResult,
    scores: list[dict[str, Any]],
    context: int,
    warnings: list[str],
) -> dict[str, Any]:
    """The content of results.json; also adds data and settings to the adapter's description."""
    trained = summarize_training(model)
    run = asdict(result)
    adaptation.training = plain(
        {
            "data": ", ".join(short_names(settings.data)),
            "documents": str(rows.report),
            "tokens in a row": rows.length,
            **({"share of rows with planted facts": settings.recall} if settings.recall else {}),
            "data_digest": rows.store.facts.digest,
            "steps": result.steps,
            "tokens": result.tokens,
            "settings": settings.train.to_dict(),
            "final_loss": result.loss,
            **{
                name_score(entry): f"{entry['perplexity_before']:.4g} before, {entry['perplexity_after']:.4g} after"
                for entry in scores
                if entry["perplexity_before"] is not None and entry["perplexity_after"] is not None
            },
            **({"warning": " ".join(warnings)} if warnings else {}),
        }
    )
    return plain(
        {
            "status": run.pop("status"),
            "note": run.pop("note"),
            "base": adaptation.base_name,
            "method": adaptation.settings.method,
            "context": context,
            "adapt": adaptation.settings.to_dict(),
            "trained": {**asdict(trained), "share": trained.share},
            "data": {"sources": list(settings.data), "digest": rows.store.facts.digest, **asdict(rows.report)},
            "train": settings.train.to_dict(),
            "run": run,
            "perplexity": scores,
            "warnings": warnings,
            "environment": describe_environment(),
        }
    )


def name_score(entry: dict[str, Any]) -> str:
    """The name of a perplexity in logs and cards."""
    return f"perplexity of {entry['data']} at {entry['length']}"


def write_run(model: EquitapeForCausalLM, trained: dict[str, Tensor], out: Path, report: dict[str, Any]) -> None:
    """Write the adapter and figures, and delete the checkpoints of a finished run."""
    if report["status"] == "done":
        save_adapter(model, out, trained)
        # the adapter has its weights; deleted now, since a finished run may get a whole model there
        shutil.rmtree(out / MODEL, ignore_errors=True)
    write_json(out / RESULTS, report)
    if report["status"] == "done":
        remove_checkpoints(out)


def remove_checkpoints(out: Path) -> None:
    """Delete what a finished run does not need; the adapter has its weights."""
    checkpoints.discard(out)


def read_finished(out: Path) -> dict[str, Any] | None:
    """The results of a finished run; None otherwise. A damaged file is an error: the run would be trained again."""
    path = out / RESULTS
    results = read_json(path)
    if path.exists() and not (isinstance(results, dict) and {"status", "adapt", "train"} <= results.keys()):
        raise ValueError(f"{path} is damaged; delete it to repeat the run.")
    return results if results is not None and results["status"] == "done" else None


def describe_kept(out: Path) -> str:
    """One sentence about what an interrupted fine-tuning has kept."""
    if checkpoints.newest(out) is None and read_finished(out) is not None:
        return f"Training is finished, and the adapter is in {out}."
    return describe_checkpoint(out)
