"""A fine-tuning run: an adapted model trained on packed documents, scored before and after, written as an adapter.

The folder of a run holds

    run.json           what decides the run; --resume refuses another
    before.json        perplexities at the start
    log.jsonl          a line for each step
    checkpoints/       the trained tensors and the optimizer, while the run goes on
    adapter.safetensors, adapter.json, README.md
    loss.png
    results.json       all figures
"""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from ..data.packing import PackedDataset, collate_rows
from ..data.text import find_files, short_names
from ..data.tokens import TokenStore, build_tokens
from ..model import EquitapeForCausalLM
from ..pretrained.adaptation import Adaptation, adaptation_of
from ..pretrained.adapter import complete_architecture, save_adapter
from ..pretrained.adapting import AdaptedForCausalLM, build
from ..pretrained.lora import lora_layers
from ..pretrained.methods import summarize_training
from ..pretrained.settings import AdaptSettings
from ..pretrained.vocabulary import check_vocabulary, tokenizer_of
from ..training import checkpoints
from ..training.environment import describe_environment
from ..training.files import plain, write_json
from ..training.fit import MODEL, FitResult, fit, uses_bf16
from .evaluation import TRAINED_ON, beside, check_lengths, score
from .settings import FinetuneSettings

RUN, BEFORE, RESULTS = "run.json", "before.json", "results.json"
UNIMPORTANT = ("log_every", "save_every", "keep", "workers", "eval_every")
"""Settings of training that change no weight."""


def finetune(
    base: str | Path,
    adapt_settings: AdaptSettings,
    settings: FinetuneSettings,
    out: Path,
    *,
    resume: bool = False,
    console: Console | None = None,
) -> dict[str, Any]:
    """Adapt a base, train it, score it, write everything to a folder. Returns what results.json holds.

    Interrupted at any moment, `resume` goes on from the last checkpoint, and neither loses nor repeats a step. Under
    `accelerate launch` every process calls this with the same arguments.
    """
    if not resume and (out / RUN).exists():
        raise ValueError(f"{str(out)!r} holds a run already; go on with it by --resume, or choose another folder.")
    for source in (*settings.data, *settings.evaluation.data.values()):
        if not source.startswith("hf:"):
            find_files(source)
    processes = PartialState(cpu=not torch.accelerator.is_available())
    bf16 = uses_bf16(settings.train)
    model = build(base, adapt_settings, torch.bfloat16 if bf16 else torch.float32)
    widen_trained(model)
    context = adapt_settings.context or model.config.context
    settings.check(context)
    tokenizer = tokenizer_of(base, settings.tokenizer)
    check_vocabulary(tokenizer, model.config.vocab_size)

    with processes.main_process_first():
        rows, texts = read_data(settings, tokenizer, context)
    lengths = settings.evaluation.lengths or (context,)
    check_lengths(texts, lengths)
    adaptation = adaptation_of(model)
    identity = describe_run(adaptation, settings, rows)
    check_identity(out, identity, resume)
    finished = read_finished(out) if resume else None
    if finished is not None:
        if console is not None and processes.is_main_process:
            console.print(f"The run in {out} was finished already.", highlight=False)
        return finished
    if processes.is_main_process:
        write_json(out / RUN, identity)

    def evaluate(model: Any) -> list[dict[str, Any]]:
        with shown_progress(console, processes) as progress:
            return score(model, texts, settings.evaluation, lengths, bf16, progress)

    def evaluate_while_training(model: Any, step: int) -> dict[str, float]:
        # the bar of the training is on the screen then
        found = score(model, texts, settings.evaluation, lengths, bf16)
        return {name_score(entry): entry["perplexity"] for entry in found}

    model.to(processes.device)
    before = read_json(out / BEFORE)
    if before is None:
        before = evaluate(model)
        if processes.is_main_process:
            write_json(out / BEFORE, before)

    with only_trained_in_checkpoints(model):
        result = fit(
            model,
            rows,
            settings.train,
            out,
            collate=collate_rows,
            evaluate=evaluate_while_training,
            resume=resume,
            console=console,
        )
    after = evaluate(model) if result.status == "done" else None
    scores = beside(before, after)
    report = describe_results(model, adaptation, settings, rows, result, scores, context)
    if processes.is_main_process:
        write_run(model, out, report)
    processes.wait_for_everyone()
    return report


def widen_trained(model: EquitapeForCausalLM) -> None:
    """Hold what trains in float32: a small step is lost in bfloat16. The frozen rest stays as narrow as it is."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.float32)
    for _, layer in lora_layers(model):
        # peft would copy the inputs to float32, and autocast back again
        layer.cast_input_dtype_enabled = False


def read_data(settings: FinetuneSettings, tokenizer: Any, context: int) -> tuple[PackedDataset, dict[str, TokenStore]]:
    """Rows to train on, and the texts to score by name."""
    store = build_tokens(settings.data, tokenizer, settings.cache)
    rows = PackedDataset(
        store,
        context,
        seed=settings.train.seed,
        min_tokens=settings.min_tokens,
        drop_remainders=settings.whole_rows,
    )
    if rows.report.tokens < context:
        raise ValueError(
            f"The data holds {rows.report.tokens:,} tokens, too few for one row of the context, {context:,}; give more "
            f"text or a shorter context."
        )
    texts = {name: build_tokens(source, tokenizer, settings.cache) for name, source in settings.evaluation.data.items()}
    return rows, texts or {TRAINED_ON: store}


def describe_run(adaptation: Adaptation, settings: FinetuneSettings, rows: PackedDataset) -> dict[str, Any]:
    """Everything that decides which weights come out."""
    train = {key: value for key, value in settings.train.to_dict().items() if key not in UNIMPORTANT}
    content = {
        "adapt": adaptation.settings.to_dict(),
        "base": adaptation.base,
        "data": {"digest": rows.store.facts.digest, **asdict(rows.report)},
        "train": train,
    }
    return json.loads(json.dumps(plain(content)))


def check_identity(out: Path, identity: dict[str, Any], resume: bool) -> None:
    """Refuse to resume a run with other settings."""
    old = read_json(out / RUN)
    if not resume or old is None:
        return
    if "architecture" in old.get("base", {}):
        old["base"]["architecture"] = complete_architecture(old["base"]["architecture"])
    for part, values in identity.items():
        for key in {**values, **old.get(part, {})}:
            was, now = old.get(part, {}).get(key), values.get(key)
            if was != now:
                raise ValueError(
                    f"The run in {str(out)!r} was begun with another {part}: {key} was {was}, now it is {now}. Resume "
                    f"with the same settings, or choose another folder."
                )


@contextmanager
def only_trained_in_checkpoints(model: AdaptedForCausalLM) -> Iterator[None]:
    """While training, a checkpoint holds the trained tensors alone; the rest is in the base, which does not change."""
    model.saves_trained_only = True
    try:
        yield
    finally:
        model.saves_trained_only = False


@contextmanager
def shown_progress(console: Console | None, processes: PartialState) -> Iterator[Callable[[str, int, int], None]]:
    """A bar for what is being scored, where there is a terminal."""
    shown = console is not None and console.is_terminal and processes.is_main_process
    columns = (TextColumn("perplexity of {task.description}"), BarColumn(bar_width=24), MofNCompleteColumn())
    with Progress(*columns, console=console, disable=not shown, transient=True) as bar:
        task = bar.add_task("")
        yield lambda what, done, of: bar.update(task, description=what, completed=done, total=of)


def describe_results(
    model: EquitapeForCausalLM,
    adaptation: Adaptation,
    settings: FinetuneSettings,
    rows: PackedDataset,
    result: FitResult,
    scores: list[dict[str, Any]],
    context: int,
) -> dict[str, Any]:
    """What results.json holds; also puts data and settings into what the adapter remembers."""
    trained = summarize_training(model)
    run = asdict(result)
    adaptation.training = plain(
        {
            "data": ", ".join(short_names(settings.data)),
            "documents": str(rows.report),
            "tokens in a row": rows.length,
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
            "environment": describe_environment(),
        }
    )


def name_score(entry: dict[str, Any]) -> str:
    """What a perplexity is called in logs and cards."""
    return f"perplexity of {entry['data']} at {entry['length']}"


def write_run(model: EquitapeForCausalLM, out: Path, report: dict[str, Any]) -> None:
    """Adapter and figures; the checkpoints of a run that ended well are not needed any more."""
    if report["status"] == "done":
        save_adapter(model, out)
    write_json(out / RESULTS, report)
    if report["status"] == "done":
        checkpoints.discard(out)
        shutil.rmtree(out / MODEL, ignore_errors=True)


def read_finished(out: Path) -> dict[str, Any] | None:
    """The results of a run that has ended well."""
    results = read_json(out / RESULTS)
    return results if results is not None and results["status"] == "done" else None


def read_json(path: Path) -> Any:
    """What a file holds, or None where there is none."""
    return json.loads(path.read_text()) if path.exists() else None
