"""What `equitape check` and `equitape inspect` need of a model built from these layers."""

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from .core import AttentionCore


@runtime_checkable
class Measurable(Protocol):
    """A module with layers from equitape.nn that can draw an input for itself and run it at given positions."""

    def sample(self, num_tokens: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """A random input [B, ...] of about that many tokens, and the ids of its tokens: [N], or [N, A]."""

    def __call__(self, inputs: Tensor, positions: Tensor) -> Any:
        """The outputs [B, ...] for an input whose tokens have these ids."""


def attention_layers(model: nn.Module) -> list[AttentionCore]:
    """The attention layers of a model, in the order of its modules."""
    return [module for module in model.modules() if isinstance(module, AttentionCore)]
