"""What `fit` costs compared with a bare loop on the same model, data, optimizer and precision.

    python benchmarks/trainer_overhead.py                       # a small model, on the device at hand
    python benchmarks/trainer_overhead.py --recipe addition-20  # the model, data and batch of a recipe

Both loops draw the same examples, clip, step a schedule and log every `log_every` steps; only the time of whole windows
between two readings of the losses counts, so that neither the start nor the compiler is in it. Rounds alternate, and
the fastest of each are compared, since whatever else goes on can only add.

On the CPU one thread works and its own time is counted. A busy machine still disturbs that by more than there is to
see, so `outside_ms` gives the part of a step that is not forward, backward, clipping, optimizer or batch: the medians
of both loops, whose difference is what Trainer adds. On CUDA work is only queued there, and the part says nothing.
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from equitape import EquitapeForCausalLM
from equitape.runs.environment import describe_environment
from equitape.training.checked import check_recipe
from equitape.training.fit import Collate, FirstExamples, fit, unmasked_length, uses_bf16
from equitape.training.log import StepLog
from equitape.training.recipe import load_recipe, parse_recipe
from equitape.training.run import build_model

SMALL = {
    "name": "small",
    "task": {"name": "addition", "trained_digits": 10, "tested_digits": 20},
    "model": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4},
    "encodings": ["tape"],
    "train": {"steps": 1, "batch_size": 16},
}
WORK = (
    (EquitapeForCausalLM, "forward"),
    (torch.Tensor, "backward"),
    (torch.nn.utils, "clip_grad_norm_"),
    (torch.optim.AdamW, "step"),
    (Collate, "__call__"),
)
clock = time.perf_counter if torch.cuda.is_available() else time.process_time


class Stopwatch:
    """When losses were read, and how much time had gone into the work of a step by then."""

    def __init__(self):
        self.marks = []
        self.work = 0.0

    def mark(self):
        self.marks.append((clock(), self.work))

    @contextmanager
    def running(self):
        functions = [getattr(owner, name) for owner, name in WORK]
        for (owner, name), function in zip(WORK, functions, strict=True):
            setattr(owner, name, self._timed(function))
        try:
            yield self
        finally:
            for (owner, name), function in zip(WORK, functions, strict=True):
                setattr(owner, name, function)

    def _timed(self, function):
        def timed(*args, **kwargs):
            began = clock()
            try:
                return function(*args, **kwargs)
            finally:
                self.work += clock() - began

        return timed

    def per_step(self, steps):
        """Seconds of a step, and of its part that is no work, from the second reading on."""
        (began, work_before), (ended, work_after) = self.marks[1], self.marks[-1]
        return (ended - began) / steps, (ended - began - work_after + work_before) / steps


def bare_loop(checked, label, settings, watch):
    """Nothing but training."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cuda = device.type == "cuda"
    model = build_model(checked.configs[label], 0).to(device).train()
    matrices = [value for value in model.parameters() if value.dim() > 1]
    others = [value for value in model.parameters() if value.dim() == 1]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas, fused=cuda)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    loader = DataLoader(
        FirstExamples(checked.task.training_set(0), settings.steps * settings.batch_size),
        batch_size=settings.batch_size,
        collate_fn=Collate(checked.task.collate, unmasked_length(model)),
        num_workers=(4 if cuda else 0) if settings.dataloader_num_workers is None else settings.dataloader_num_workers,
        pin_memory=cuda,
    )
    losses = []
    for step, batch in enumerate(loader, 1):
        batch = {name: value.to(device, non_blocking=True) for name, value in batch.items()}
        with torch.autocast(device.type, torch.bfloat16, enabled=uses_bf16(settings)):
            loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if step % settings.logging_steps == 0:
            torch.stack(losses).tolist()
            losses.clear()
            watch.mark()


def fit_loop(checked, label, settings, watch):
    """The same by `fit`."""
    folder, flush = Path(tempfile.mkdtemp()), StepLog.flush

    def marked(self):
        lines = flush(self)
        watch.mark()
        return lines

    StepLog.flush = marked
    try:
        model = build_model(checked.configs[label], 0)
        fit(model, checked.task.training_set(0), settings, folder / "run", collate=checked.task.collate)
    finally:
        StepLog.flush = flush
        shutil.rmtree(folder)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", help="a recipe, instead of the small model")
    parser.add_argument("--encoding", default="tape")
    parser.add_argument("--log-every", type=int, default=20)
    parser.add_argument("--windows", type=int, default=5, help="readings of the losses that are timed in a round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("overrides", nargs="*", help="key=value, as for equitape train")
    options = parser.parse_args()
    torch.set_num_threads(1)
    recipe = load_recipe(options.recipe, options.overrides) if options.recipe else parse_recipe(SMALL)
    checked = check_recipe(recipe)
    settings = replace(
        recipe.train,
        steps=options.log_every * (options.windows + 2),
        tokens=None,
        minutes=None,
        logging_steps=options.log_every,
        save_steps=10**6,
        compile=False,
    )
    loops, steps, outside = {"bare": bare_loop, "fit": fit_loop}, {}, {}
    for number in range(options.rounds):
        # whoever comes second finds a warmer machine
        for name in sorted(loops, reverse=number % 2 == 1):
            with Stopwatch().running() as watch:
                loops[name](checked, options.encoding, settings, watch)
            # the last reading is left out as well: a run ends with a checkpoint
            watch.marks = watch.marks[: options.windows + 2]
            step, rest = watch.per_step(options.windows * options.log_every)
            steps.setdefault(name, []).append(1000 * step)
            outside.setdefault(name, []).append(1000 * rest)
            print(f"round {number + 1}, {name}: {1000 * step:.2f} ms per step", file=sys.stderr, flush=True)
    fastest = {name: min(times) for name, times in steps.items()}
    rests = {name: statistics.median(times) for name, times in outside.items()}
    row = {
        "recipe": recipe.name,
        "encoding": options.encoding,
        "batch_size": settings.batch_size,
        "step_ms": {name: [round(time, 3) for time in times] for name, times in steps.items()},
        "overhead_percent": round(100 * (fastest["fit"] / fastest["bare"] - 1), 2),
    }
    if not torch.cuda.is_available():
        row["outside_ms"] = {name: round(rest, 3) for name, rest in rests.items()}
        row["outside_percent"] = round(100 * (rests["fit"] - rests["bare"]) / statistics.median(steps["bare"]), 2)
    print(json.dumps(row | describe_environment(), indent=1))


if __name__ == "__main__":
    main()
