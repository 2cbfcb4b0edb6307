"""Parity: after every bit, whether the number of ones so far is odd."""

import torch
from torch import Tensor

from .states import StepOptions, StepTask

BEGIN, PAD = 2, 3


class Parity(StepTask):
    """Tokens 0 and 1 are the bits, and also the answers even and odd."""

    name = "parity"
    idea = "after every bit: are the ones so far odd? longer rows than in training"
    options_class = StepOptions
    vocab_size = 4
    bos_token_id = BEGIN
    pad_token_id = PAD

    def draw_steps(self, count: int, steps: int, generator: torch.Generator) -> Tensor:
        return torch.randint(0, 2, (count, steps), generator=generator)

    def follow(self, steps: Tensor) -> Tensor:
        return steps.cumsum(1) % 2
