"""Training settings."""

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from ..settings import Ge, Gt, Le, Lt, Settings

Count = Annotated[int, Ge(1), Le(10**12)]
"""A positive number of steps, tokens or examples."""
Share = Annotated[float, Ge(0), Le(1)]
Seed = Annotated[int, Ge(0), Lt(2**32)]
"""The range of seeds that all libraries accept."""
MOST_RATE = 1e30
MOST_JUMP = 1_000_000
"""Far beyond any use; what float32 cannot hold ends in an error of torch."""
UNIMPORTANT = ("logging_steps", "eval_steps", "save_steps", "save_total_limit", "dataloader_num_workers")
"""Settings that do not affect weights or scores."""


@dataclass(frozen=True, kw_only=True)
class Jumps(Settings):
    """How position ids jump ahead in training."""

    rate: Share = 0.03
    """Probability of a jump at each token."""
    size: Annotated[float, Gt(0), Le(MOST_JUMP)] = 2.0
    """Largest jump, in multiples of the length of the longest training row."""
    shape: Literal["uniform", "log"] = "uniform"
    """Distribution of jump sizes: "uniform", or "log" (log-uniform: small sizes more often)."""
    stretch: Annotated[int, Ge(1), Le(MOST_JUMP)] = 1
    """Ids of a row grow by a stride drawn from 1 to this, instead of by 1."""
    after: tuple[Annotated[int, Ge(0)], ...] = ()
    """Token ids, for example [10, 12], after which jumps may occur. Default: after any token."""
    restart: tuple[Annotated[int, Ge(0)], ...] = ()
    """Token ids, for example of separators, at which the row's jumps begin again: the n-th tokens after each of them,
    and the n-th token of the row, jump alike. The separators always jump. Default: none."""
    total: Annotated[float, Gt(0), Le(MOST_JUMP)] | None = None
    """Largest sum of the jumps of a row, in multiples of the length of the longest. Default: no limit."""

    def __post_init__(self) -> None:
        if self.after and self.restart:
            raise ValueError("jumps: after and restart are both set; `restart` tokens always jump, so set only one.")

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens that decide where jumps are."""
        return self.after + self.restart

    def largest(self, row_length: int) -> int:
        """The largest jump in rows of this many tokens."""
        return max(1, math.floor(self.size * row_length))


@dataclass(frozen=True, kw_only=True)
class TrainSettings(Settings):
    """Budget, optimizer, logging and checkpoints of one run. Set exactly one of steps, tokens and minutes."""

    steps: Count | None = None
    """Budget in optimizer steps."""
    tokens: Count | None = None
    """Budget in tokens, converted to steps by the mean length of the first examples."""
    minutes: Annotated[float, Gt(0)] | None = None
    """Budget in minutes of training on this machine. Such a run depends on the clock and is not reproducible."""
    batch_size: Count = 64
    """Examples per optimizer step, summed over processes and micro-batches."""
    gradient_accumulation_steps: Count = 1
    """Micro-batches per optimizer step; more need less memory."""
    learning_rate: Annotated[float, Ge(0), Le(MOST_RATE)] = 1e-3
    """Peak learning rate."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Schedule after warm-up: "cosine" or "linear" decay to `final_rate`, or "constant"."""
    warmup_ratio: Share = 0.05
    """Fraction of the budget over which the learning rate warms up from zero."""
    final_rate: Share = 0.0
    """Final learning rate, as a fraction of the peak."""
    weight_decay: Annotated[float, Ge(0)] = 0.01
    """AdamW's weight decay, applied to matrices only, not to biases and norms."""
    betas: tuple[Annotated[float, Ge(0), Lt(1)], Annotated[float, Ge(0), Lt(1)]] = (0.9, 0.98)
    """AdamW's beta1 and beta2."""
    epsilon: Annotated[float, Ge(0)] = 1e-8
    """AdamW's epsilon."""
    max_grad_norm: Annotated[float, Ge(0)] = 1.0
    """Maximum gradient norm; 0 disables clipping."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """"bf16" (autocast with float32 weights), "fp32", or "auto": bf16 on CUDA, fp32 elsewhere."""
    compile: bool | Literal["auto", "blocks"] = False
    """Use torch.compile, and pad batches to one length to compile one graph only. "auto": on CUDA only; "blocks": each
    block by itself, which compiles much sooner for a model of many blocks."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass instead of keeping them."""
    dataloader_num_workers: Annotated[int, Ge(0)] | None = None
    """Processes that prepare batches; they do not affect the order. Default: 4 with CUDA, 0 without."""
    jumps: Jumps | None = None
    """Position ids jump ahead in training, as in {rate: 0.03}, to cover long distances in short rows. Default: none."""
    seed: Seed = 0
    """Seed of dropout and random positions. In a recipe, it is the seed of the run, from `seeds`."""
    logging_steps: Count = 10
    """Steps between reads of the losses from the device; log.jsonl still has one line per step."""
    eval_steps: Count | None = None
    """Steps between evaluations during training. Default: none during training."""
    save_steps: Count | None = None
    """Steps between checkpoints. Default: a tenth of the budget, at least 50; with one process also once per minute,
    unless saving takes more than a twentieth of the time."""
    save_total_limit: Count = 2
    """Number of newest checkpoints to keep."""

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
            raise ValueError(f"train: {' and '.join(given)} are set; set only one of steps, tokens and minutes.")
        if self.batch_size % self.gradient_accumulation_steps:
            raise ValueError(
                f"train: batch_size {self.batch_size} is not a multiple of gradient_accumulation_steps "
                f"{self.gradient_accumulation_steps}; all micro-batches must have the same size."
            )


def current_names(train: dict[str, Any]) -> dict[str, Any]:
    """Training settings as plain data under their current names."""
    return {TrainSettings.aliases.get(key, key): value for key, value in train.items()}
