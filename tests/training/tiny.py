"""A small run that processes and tests train alike."""

import json
import multiprocessing
import os
import signal
from functools import partial
from pathlib import Path

import torch

from cases import VOCAB, build
from equitape.tasks.base import NumberedExamples, pad_right
from equitape.training.fit import FitResult, fit
from equitape.training.settings import TrainSettings

LENGTH = 12


def make_block(count: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Rows whose second half repeats the first, cut to random lengths; some labels do not count."""
    tokens = torch.randint(1, VOCAB, (count, LENGTH), generator=generator)
    tokens[:, LENGTH // 2 :] = tokens[:, : LENGTH // 2]
    labels = tokens.masked_fill(torch.rand(tokens.shape, generator=generator) < 0.2, -100)
    return {
        "input_ids": tokens,
        "labels": labels,
        "lengths": torch.randint(5, LENGTH + 1, (count,), generator=generator),
    }


def small_model(encoding: str = "tape", **changes) -> torch.nn.Module:
    """Random weights; dropout, so that a lost random state shows."""
    sizes = {"num_hidden_layers": 2, "attention_dropout": 0.1, **changes}
    return build(encoding, dtype=torch.float32, **sizes).train()


def numbered(size: int = 100_000) -> NumberedExamples:
    return NumberedExamples(make_block, 0, size)


def settings(**changes) -> TrainSettings:
    return TrainSettings(
        **{"steps": 24, "batch_size": 8, "learning_rate": 1e-2, "save_steps": 5, "logging_steps": 3, **changes}
    )


def draw(model: torch.nn.Module, step: int) -> dict[str, float]:
    """An evaluation that depends on the model, and draws random numbers that training must not miss."""
    torch.rand(3)
    tokens = torch.arange(1, 9)[None]
    return {"loss": float(model(tokens, labels=tokens).loss)}


def run(
    run_dir: Path,
    *,
    encoding: str = "tape",
    dropout: float = 0.1,
    resume: bool = False,
    sizes: dict | None = None,
    collate=None,
    **changes,
) -> FitResult:
    return fit(
        small_model(encoding, attention_dropout=dropout, **(sizes or {})),
        numbered(),
        settings(**changes),
        run_dir,
        collate=collate or partial(pad_right, pad_token_id=0),
        evaluate=draw,
        resume=resume,
    )


def read_lines(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (Path(run_dir) / "log.jsonl").read_text().splitlines()]


def losses(run_dir: Path) -> list[float]:
    return [line["loss"] for line in read_lines(run_dir) if "loss" in line]


def kill_at(place: str, count: int) -> None:
    """End this process as `kill -9` does, at the count-th time a place is reached."""
    from equitape.training import checkpoints, log

    left = [count]

    def wrap(owner: object, name: str) -> None:
        function = getattr(owner, name)

        def counted(*args, **kwargs):
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        setattr(owner, name, counted)

    places = {
        "step": (log.StepLog, "end_step"),
        "micro-batch": (log.StepLog, "add_micro_batch"),
        "writing the log": (log.StepLog, "_write"),
        "saving weights": (torch, "save"),
        "checksums": (checkpoints, "_checksum"),
        "before renaming": (os, "replace"),
        "removing": (checkpoints, "remove"),
    }
    wrap(*places[place])


def run_and_die(run_dir: Path, place: str, count: int, **changes) -> int:
    """Run in a separate process that kills itself; returns its exit code."""
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_die, args=(run_dir, place, count, changes))
    process.start()
    process.join()
    return process.exitcode


def _die(run_dir: Path, place: str, count: int, changes: dict) -> None:
    kill_at(place, count)
    run(run_dir, **changes)
