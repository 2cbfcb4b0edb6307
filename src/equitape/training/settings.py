"""How a model is trained."""

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from ..settings import Ge, Gt, Le, Lt, Settings

Count = Annotated[int, Ge(1), Le(10**12)]
"""A number of steps, tokens or examples."""
Share = Annotated[float, Ge(0), Le(1)]
Seed = Annotated[int, Ge(0), Lt(2**32)]
"""What all libraries take as a seed."""
UNIMPORTANT = ("logging_steps", "eval_steps", "save_steps", "save_total_limit", "dataloader_num_workers")
"""Settings that change no weight and no score."""


@dataclass(frozen=True, kw_only=True)
class Jumps(Settings):
    """How ids jump ahead while training."""

    rate: Share = 0.03
    """Probability of a jump at each token."""
    size: Annotated[float, Gt(0)] = 2.0
    """Largest jump, in lengths of a training row."""
    shape: Literal["uniform", "log"] = "uniform"
    """How sizes are drawn: all alike ("uniform"), or small ones more often ("log": the logarithm is uniform)."""
    stretch: Annotated[int, Ge(1)] = 1
    """Ids of a row grow by a step drawn from 1 to this, instead of by 1."""
    after: tuple[Annotated[int, Ge(0)], ...] = ()
    """Token ids, as [10, 12]: jumps fall only right after one of these. Default: anywhere."""

    def largest(self, num_tokens: int) -> int:
        """The largest jump in rows of so many tokens."""
        return max(1, math.floor(self.size * num_tokens))


@dataclass(frozen=True, kw_only=True)
class TrainSettings(Settings):
    """Budget, optimizer and bookkeeping of one run. Exactly one of steps, tokens and minutes is given."""

    steps: Count | None = None
    """Budget in optimizer steps."""
    tokens: Count | None = None
    """Budget in tokens, converted to steps by the mean length of the first examples."""
    minutes: Annotated[float, Gt(0)] | None = None
    """Budget in minutes of training on this machine; such a run depends on the clock and cannot be repeated exactly."""
    batch_size: Count = 64
    """Examples per optimizer step, over all processes and micro-batches together."""
    gradient_accumulation_steps: Count = 1
    """Micro-batches per optimizer step; more of them need less memory."""
    learning_rate: Annotated[float, Ge(0)] = 1e-3
    """The highest learning rate."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """What follows the warm-up: "cosine" or "linear" down to `final_rate`, or "constant"."""
    warmup_ratio: Share = 0.05
    """Share of the budget over which the learning rate grows from zero."""
    final_rate: Share = 0.0
    """Learning rate at the end, as a share of the highest."""
    weight_decay: Annotated[float, Ge(0)] = 0.01
    """AdamW's weight decay, of matrices only: biases and norms have none."""
    betas: tuple[Annotated[float, Ge(0), Lt(1)], Annotated[float, Ge(0), Lt(1)]] = (0.9, 0.98)
    """AdamW's two decay rates of running averages."""
    epsilon: Annotated[float, Ge(0)] = 1e-8
    """AdamW's guard against division by zero."""
    max_grad_norm: Annotated[float, Ge(0)] = 1.0
    """Gradients are clipped to this norm; 0 does not clip."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """"bf16" (autocast, weights stay float32), "fp32", or "auto": bf16 on CUDA, fp32 elsewhere."""
    compile: bool | Literal["auto"] = False
    """torch.compile; batches are then padded to one length, so that one graph serves them all. "auto": on CUDA only."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass instead of keeping them."""
    dataloader_num_workers: Annotated[int, Ge(0)] | None = None
    """Processes that prepare batches, which never changes their order. Default: 4 with CUDA, 0 without."""
    jumps: Jumps | None = None
    """Ids that jump ahead while training, as {rate: 0.03}: short rows then show long distances. Default: none."""
    seed: Seed = 0
    """Seed of dropout and of encodings that draw positions. In a recipe it is that of the run, from `seeds`."""
    logging_steps: Count = 10
    """Steps between two reads of the losses from the device; log.jsonl still has a line for every step."""
    eval_steps: Count | None = None
    """Steps between evaluations while training. Default: no evaluation while training."""
    save_steps: Count | None = None
    """Steps between checkpoints. Default: a tenth of the budget, at least 50."""
    save_total_limit: Count = 2
    """How many of the newest checkpoints are kept."""

    aliases = {
        "accumulation": "gradient_accumulation_steps",
        "clip": "max_grad_norm",
        "warmup": "warmup_ratio",
        "keep": "save_total_limit",
        "workers": "dataloader_num_workers",
        "log_every": "logging_steps",
        "eval_every": "eval_steps",
        "save_every": "save_steps",
    }

    def __post_init__(self) -> None:
        given = [name for name in ("steps", "tokens", "minutes") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"train: {' and '.join(given)} are given; a budget is one of steps, tokens and minutes.")
        if self.batch_size % self.gradient_accumulation_steps:
            raise ValueError(
                f"train: batch_size {self.batch_size} is not a multiple of gradient_accumulation_steps "
                f"{self.gradient_accumulation_steps}; every micro-batch has the same size."
            )


def current_names(train: dict[str, Any]) -> dict[str, Any]:
    """Training settings as plain data, under the current names."""
    return {TrainSettings.aliases.get(key, key): value for key, value in train.items()}
