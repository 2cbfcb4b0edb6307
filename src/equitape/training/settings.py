"""How a model is trained."""

import math
from dataclasses import dataclass

from ..registry import describe_choices
from ..settings import Settings

SCHEDULES = ("cosine", "linear", "constant")
PRECISIONS = ("auto", "bf16", "fp32")


@dataclass(frozen=True, kw_only=True)
class TrainSettings(Settings):
    """Budget, optimizer and bookkeeping of one run. Exactly one of steps, tokens and minutes is given."""

    steps: int | None = None
    """Budget in optimizer steps."""
    tokens: int | None = None
    """Budget in tokens, turned into steps by the mean length of the first examples."""
    minutes: float | None = None
    """Budget in minutes of training on this machine; such a run depends on the clock and cannot be repeated exactly."""
    batch_size: int = 64
    """Examples in an optimizer step, over all processes and micro-batches together."""
    accumulation: int = 1
    """Micro-batches an optimizer step is split into, to save memory."""
    learning_rate: float = 1e-3
    """The highest learning rate."""
    schedule: str = "cosine"
    """What follows the warm-up: "cosine" or "linear" down to `final_rate`, or "constant"."""
    warmup: float = 0.05
    """Share of the budget over which the learning rate grows from nothing."""
    final_rate: float = 0.0
    """Learning rate at the end, as a share of the highest."""
    weight_decay: float = 0.01
    """AdamW's decay of matrices; biases and norms are left alone."""
    betas: tuple[float, ...] = (0.9, 0.98)
    """AdamW's two averages."""
    epsilon: float = 1e-8
    """AdamW's guard against division by zero."""
    clip: float = 1.0
    """Largest norm of the gradient; 0 does not clip."""
    precision: str = "auto"
    """"bf16" (autocast, weights stay float32), "fp32", or "auto": bf16 on CUDA, fp32 elsewhere."""
    compile: bool | str = False
    """torch.compile; batches are then padded to one length, so that one graph serves them all. "auto": on CUDA only."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass instead of keeping them."""
    workers: int | None = None
    """Processes that prepare batches, which never changes their order; 0 without CUDA and 4 with it when left out."""
    seed: int = 0
    """Seed of dropout and of encodings that draw positions. In a recipe it is that of the run, from `seeds`."""
    log_every: int = 10
    """Steps between two readings of the losses gathered on the device; every step still has its line in log.jsonl."""
    eval_every: int | None = None
    """Steps between evaluations while training; none when left out."""
    save_every: int | None = None
    """Steps between checkpoints; a tenth of the budget, and at least 50 steps, when left out."""
    keep: int = 2
    """Checkpoints kept, the newest ones."""

    def __post_init__(self) -> None:
        budgets = {name: getattr(self, name) for name in ("steps", "tokens", "minutes")}
        given = [name for name, value in budgets.items() if value is not None]
        if len(given) > 1:
            raise ValueError(f"train: {' and '.join(given)} are given; a budget is one of steps, tokens and minutes.")
        for name in ("batch_size", "accumulation", "log_every", "keep", *given):
            self._at_least_one(name)
        for name in ("eval_every", "save_every"):
            if getattr(self, name) is not None:
                self._at_least_one(name)
        if self.batch_size % self.accumulation:
            raise ValueError(
                f"train: batch_size {self.batch_size} is not a multiple of accumulation {self.accumulation}; "
                f"every micro-batch has the same size."
            )
        for name, allowed in (("schedule", SCHEDULES), ("precision", PRECISIONS)):
            if getattr(self, name) not in allowed:
                value = getattr(self, name)
                raise ValueError(f"train: there is no {name} {value!r}.{describe_choices(value, allowed)}")
        if self.compile not in (True, False, "auto"):
            raise ValueError(f"train: compile is {self.compile!r}; it must be true, false or 'auto'.")
        for name in ("warmup", "final_rate"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"train: {name} is {getattr(self, name)}; it is a share, from 0 to 1.")
        if len(self.betas) != 2 or not all(isinstance(beta, float) and 0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"train: betas is {list(self.betas)}; it must be two numbers from 0 to below 1.")
        for name in ("learning_rate", "weight_decay", "clip", "epsilon"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"train: {name} is {getattr(self, name)}; it must be a number of 0 or more.")
        if self.workers is not None and self.workers < 0:
            raise ValueError(f"train: workers is {self.workers}; it must be 0 or more.")

    def _at_least_one(self, name: str) -> None:
        value = getattr(self, name)
        if not 0 < value < math.inf or (name != "minutes" and value < 1):
            raise ValueError(
                f"train: {name} is {value}; it must be {'more than 0' if name == 'minutes' else '1 or more'}."
            )
