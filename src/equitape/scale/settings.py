"""The settings of a plan; imports nothing heavy."""

from dataclasses import dataclass
from typing import Annotated, Literal

from ..settings import Ge, Le, Settings

GpuName = Literal["a100", "h100", "h200", "b200"]
MOST_GPUS = 1 << 20
MOST_TOKENS = 10**12
MOST_ROWS = 10**9


@dataclass(frozen=True, kw_only=True)
class PlanSettings(Settings):
    """What to plan for."""

    length: Annotated[int, Ge(2), Le(MOST_TOKENS)]
    """Tokens per row."""
    gpus: Annotated[int, Ge(1), Le(MOST_GPUS)] = 8
    """Number of GPUs."""
    gpu: GpuName = "h200"
    """Their kind."""
    batch: Annotated[int, Ge(1), Le(MOST_ROWS)] = 1
    """Rows that each group of GPUs reads at a time; a group shares every row."""
    context_parallel: Annotated[int, Ge(1)] | None = None
    """GPUs among which each row is split. Default: the fewest with nearly the most tokens per second."""
    checkpointing: bool | None = None
    """Recompute activations in the backward pass. Default: what is faster among layouts that fit."""
    precision: Literal["mixed", "bfloat16"] = "mixed"
    """mixed trains float32 weights and computes in bfloat16, as Trainer does; bfloat16 has nothing in float32."""
    encodings: tuple[str, ...] = ()
    """Encoding, with options after it: 'tape layers=[0]'. Default: the model's, and TAPE if that is RoPE."""

    def __post_init__(self) -> None:
        parts = self.context_parallel
        if parts is None:
            return
        if self.gpus % parts:
            raise ValueError(f"{self.gpus} GPUs cannot form groups of {parts}; give a divisor of {self.gpus}.")
        if parts > 1 and self.length % (2 * parts):
            raise ValueError(
                f"A row of {self.length:,} tokens cannot be split over {parts} GPUs; every GPU gets two equal pieces, "
                f"so give a length that is a multiple of {2 * parts}."
            )
