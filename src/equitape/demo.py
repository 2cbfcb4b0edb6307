"""The demo: train two encodings on small additions, compare them, and let them answer a few sums."""

import time
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from .model import EquitapeConfig, EquitapeForCausalLM
from .tasks import addition


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """How much the demo does; the defaults take a few minutes on two CPU cores."""

    encodings: tuple[str, ...] = ("rope", "tape")
    trained_digits: int = 3
    tested_digits: int = 5
    steps: int = 1000
    batch_size: int = 64
    samples: int = 64
    seed: int = 0


def build_model(kind: str, settings: DemoSettings) -> EquitapeForCausalLM:
    """A decoder of a third of a million parameters."""
    torch.manual_seed(settings.seed)
    config = EquitapeConfig(
        vocab_size=addition.VOCAB_SIZE,
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=addition.END,
        pad_token_id=addition.PAD,
        # wider than usual: so small a model starts faster from larger weights
        initializer_range=0.08,
        encoding={"kind": kind},
    )
    return EquitapeForCausalLM(config)


def train(model: EquitapeForCausalLM, settings: DemoSettings, progress: Progress, name: str) -> None:
    """AdamW with warm-up and a cosine to nothing; every encoding sees the same sums."""
    generator = torch.Generator().manual_seed(settings.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=settings.steps, pct_start=0.1)
    task = progress.add_task(name, total=settings.steps, loss="")
    model.train()
    for _ in range(settings.steps):
        lengths = addition.draw_lengths(settings.batch_size, settings.trained_digits, generator)
        loss = model(**addition.make_sums(*lengths, generator).training_inputs(), use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        progress.update(task, advance=1, loss=f"loss {loss.item():.3f}")
    model.eval()


def evaluate(model: EquitapeForCausalLM, settings: DemoSettings) -> tuple[float, float]:
    """Exact match averaged over operand sizes seen in training, and over sizes of which at least one was not."""
    generator = torch.Generator().manual_seed(settings.seed + 1)
    inside: list[float] = []
    outside: list[float] = []
    for left in range(1, settings.tested_digits + 1):
        for right in range(1, settings.tested_digits + 1):
            score = addition.exact_match(model, left, right, settings.samples, generator)
            (inside if max(left, right) <= settings.trained_digits else outside).append(score)
    return sum(inside) / len(inside), sum(outside) / max(len(outside), 1)


def run(settings: DemoSettings, console: Console) -> None:
    """Train, evaluate, print."""
    reach, beyond = settings.trained_digits, settings.tested_digits
    console.print(
        f"Training on sums of numbers of 1 to {reach} digits, "
        f"{settings.steps} steps of {settings.batch_size}, seed {settings.seed}."
    )
    table = Table(title="Sums answered correctly in every digit")
    table.add_column("encoding")
    table.add_column("parameters", justify="right")
    table.add_column("training", justify="right")
    table.add_column(f"up to {reach} digits (trained)", justify="right")
    table.add_column(f"up to {beyond} digits (not trained)", justify="right")
    columns = (
        TextColumn("{task.description:>10}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
    )
    models = {}
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        for kind in settings.encodings:
            model = build_model(kind, settings)
            started = time.perf_counter()
            train(model, settings, progress, kind)
            seconds = time.perf_counter() - started
            inside, outside = evaluate(model, settings)
            table.add_row(kind, f"{model.num_parameters():,}", f"{seconds:.0f} s", f"{inside:.1%}", f"{outside:.1%}")
            models[kind] = model
    console.print(table)
    console.print("One seed, one small model: a demonstration, not a comparison.\n")
    answer_sums(models, settings, console)


def answer_sums(models: dict[str, EquitapeForCausalLM], settings: DemoSettings, console: Console) -> None:
    """A few sums answered by `generate`."""
    generator = torch.Generator().manual_seed(settings.seed + 2)
    for digits in (2, settings.trained_digits, settings.trained_digits + 1):
        low, high = 10 ** (digits - 1), 10**digits
        left, right = (int(torch.randint(low, high, (), generator=generator)) for _ in range(2))
        answers = []
        for kind, model in models.items():
            tokens = addition.greedy_answers(model, addition.encode(left, right), digits + 2)
            answer = addition.decode(tokens[0])
            colour = "green" if answer == str(left + right) else "red"
            answers.append(f"{kind} [{colour}]{answer}[/{colour}]")
        console.print(f"  {left} + {right} = {left + right}:  {',  '.join(answers)}")
