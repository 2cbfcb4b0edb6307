"""What `fit` costs beside a bare loop on the same model, data, optimizer and precision.

    python benchmarks/trainer_overhead.py                       # a small model, on the device at hand
    python benchmarks/trainer_overhead.py --recipe addition-20  # the model, data and batch of a recipe

Both loops draw the same examples, clip, step a schedule and log every `log_every` steps; only the time of whole windows
between two readings of the losses counts, so that neither the start nor the compiler is in it. Rounds alternate, and
the fastest of each are compared, since whatever else goes on can only add. On the CPU one thread works and its own time
is counted. The default model is so small that Trainer's share of a step shows.
"""

import argparse
import json
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from equitape.training.environment import describe_environment
from equitape.training.fit import Collate, FirstExamples, fit, uses_bf16
from equitape.training.plan import make_plan
from equitape.training.recipe import load_recipe, parse_recipe
from equitape.training.run import build_model

SMALL = {
    "name": "small",
    "task": {"name": "addition", "trained_digits": 10, "tested_digits": 20},
    "model": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4},
    "encodings": ["tape"],
    "train": {"steps": 1, "batch_size": 16},
}


clock = time.perf_counter if torch.cuda.is_available() else time.process_time


def bare_seconds(plan, label, settings, windows):
    """Seconds a step of a loop that does nothing but train."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cuda = device.type == "cuda"
    model = build_model(plan.configs[label], 0).to(device).train()
    matrices = [value for value in model.parameters() if value.dim() > 1]
    others = [value for value in model.parameters() if value.dim() == 1]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas, fused=cuda)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    loader = DataLoader(
        FirstExamples(plan.task.training_set(0), settings.steps * settings.batch_size),
        batch_size=settings.batch_size,
        collate_fn=Collate(plan.task.collate),
        num_workers=settings.workers if settings.workers is not None else (4 if cuda else 0),
        pin_memory=cuda,
    )
    losses, marks = [], []
    for step, batch in enumerate(loader, 1):
        batch = {name: value.to(device, non_blocking=True) for name, value in batch.items()}
        with torch.autocast(device.type, torch.bfloat16, enabled=uses_bf16(settings)):
            loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if step % settings.log_every == 0:
            torch.stack(losses).tolist()
            losses.clear()
            marks.append(clock())
    return (marks[-1] - marks[0]) / (windows * settings.log_every)


def fit_seconds(plan, label, settings, windows):
    """The same of `fit`, by its own clock, which counts from the first reading on as well."""
    folder = Path(tempfile.mkdtemp())
    marks = []
    from equitape.training.log import StepLog

    flush = StepLog.flush

    def marked(self):
        lines = flush(self)
        marks.append(clock())
        return lines

    StepLog.flush = marked
    try:
        model = build_model(plan.configs[label], 0)
        fit(model, plan.task.training_set(0), settings, folder / "run", collate=plan.task.collate)
    finally:
        StepLog.flush = flush
        shutil.rmtree(folder)
    return (marks[windows] - marks[0]) / (windows * settings.log_every)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", help="a recipe, instead of the small model")
    parser.add_argument("--encoding", default="tape")
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--windows", type=int, default=5, help="readings of the losses that are timed in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("overrides", nargs="*", help="key=value, as for equitape train")
    options = parser.parse_args()
    torch.set_num_threads(1)
    recipe = load_recipe(options.recipe, options.overrides) if options.recipe else parse_recipe(SMALL)
    plan = make_plan(recipe)
    steps = options.log_every * (options.windows + 1)
    settings = replace(recipe.train, steps=steps, tokens=None, minutes=None, log_every=options.log_every,
                       save_every=10**6, compile=False)  # fmt: skip
    bare, ours = [], []
    for number in range(options.rounds):
        pair = [(bare, bare_seconds), (ours, fit_seconds)]
        # whoever comes second finds a warmer machine
        for times, measure in pair if number % 2 else reversed(pair):
            times.append(measure(plan, options.encoding, settings, options.windows))
    first, second = min(bare), min(ours)
    print(
        json.dumps(
            {
                "recipe": recipe.name,
                "encoding": options.encoding,
                "batch_size": settings.batch_size,
                "bare_ms": [round(1000 * value, 3) for value in bare],
                "fit_ms": [round(1000 * value, 3) for value in ours],
                "overhead_ms": round(1000 * (second - first), 3),
                "overhead_percent": round(100 * (second / first - 1), 2),
                **describe_environment(),
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
