"""What a fine-tuning run would do and cost, from one measured step."""

import time
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from rich.console import Console

from ..data.packing import collate_rows
from ..pretrained.methods import summarize_training
from ..pretrained.settings import AdaptSettings, adaptation_of
from ..runs.environment import peak_mib, reset_peak
from ..runs.errors import is_out_of_memory
from ..runs.progress import Progress
from ..tasks.perplexity import spread_over_documents
from ..training.fit import count_steps
from .finetune import Prepared, check_sources, prepare
from .settings import FinetuneSettings

OPTIMIZER_BYTES = 8
"""Adam's two averages of a trained parameter."""
FORWARD_SHARE = 1 / 3
"""Of a step: the backward pass takes about twice as long as the forward pass."""


def dry_run(
    base: str | Path, adapt_settings: AdaptSettings, settings: FinetuneSettings, *, console: Console | None = None
) -> dict[str, Any]:
    """Check everything as a run would, measure one step, and estimate the rest. Nothing is written but the cache."""
    tokenizer = check_sources(base, settings)
    processes = PartialState(cpu=not torch.accelerator.is_available())
    progress = Progress(console if processes.is_main_process else None)
    prepared = prepare(base, adapt_settings, settings, tokenizer, progress)
    rows, train = prepared.rows, settings.train
    trained = summarize_training(prepared.model)
    steps = count_steps(train, rows)
    per_device = max(1, train.batch_size // train.gradient_accumulation_steps // processes.num_processes)
    note, seconds, memory = "", None, None
    try:
        with progress.phase("measuring a step"):
            seconds, memory = measure_step(prepared, settings, per_device, processes.device)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        note = (
            f"One step runs out of memory with {per_device} rows at a time; use --gradient-checkpointing, a smaller "
            f"--batch-size or a larger --accumulation."
        )
    scored = count_scored(prepared, settings)
    per_token = None if seconds is None else seconds / (per_device * rows.length)
    return {
        "status": "done",
        "base": adaptation_of(prepared.model).base_name,
        "method": adapt_settings.method,
        "context": prepared.context,
        "trained": {**asdict(trained), "share": trained.share},
        "data": asdict(rows.report),
        "warnings": prepared.warnings,
        "steps": steps,
        "tokens": steps * train.batch_size * rows.length,
        "epochs": steps * train.batch_size / rows.report.rows,
        "device": str(processes.device),
        "peak_mib": None if memory is None else memory + OPTIMIZER_BYTES * trained.parameters / 2**20,
        "training_seconds": None if seconds is None else seconds * steps * train.gradient_accumulation_steps,
        "scoring_seconds": None if per_token is None else 2 * scored * per_token * FORWARD_SHARE,
        "note": note,
    }


def measure_step(
    prepared: Prepared, settings: FinetuneSettings, batch_size: int, device: torch.device
) -> tuple[float, float | None]:
    """(seconds, peak MiB) of one forward and backward pass; the first of two warms up."""
    model = prepared.model.to(device).train()
    if settings.train.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    batch = collate_rows([prepared.rows[index] for index in range(batch_size)])
    batch = {name: tensor.to(device) for name, tensor in batch.items()}
    seconds = 0.0
    reset_peak()
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        begun = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16) if prepared.bf16 else nullcontext():
            loss = model(**batch, use_cache=False).loss
        loss.backward()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        seconds = time.perf_counter() - begun
    return seconds, peak_mib()


def count_scored(prepared: Prepared, settings: FinetuneSettings) -> int:
    """Tokens that scoring reads once, over all texts and lengths."""
    total = 0.0
    for store in prepared.texts.values():
        pieces = spread_over_documents(store.lengths.tolist(), max(prepared.lengths), settings.evaluation.windows)
        predictions = sum(stop - start for spans in pieces for start, stop in spans)
        for length in prepared.lengths:
            total += predictions * length / (settings.evaluation.stride or length)
    return round(total)
