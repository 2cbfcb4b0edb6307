"""FIRE: a small network of the distance, normalised by the query's position (docs/reference/encodings/fire.md)."""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from ..settings import Gt, Positive
from .base import LayerEncoding, PositionalEncoding, SmallLinear, register_encoding
from .frequencies import position_dtype
from .options import Options
from .positions import Positions


@dataclass(frozen=True, kw_only=True)
class FIREOptions(Options):
    """Options of FIRE."""

    width: Positive = 32
    """Hidden width of the network."""
    initial_c: Annotated[float, Gt(0)] = 0.1
    initial_threshold: Annotated[float, Gt(0)] = 512.0
    """Initial L, the position below which distances are normalised by L instead of the query's position."""


class HeadsFirst(SmallLinear):
    """A linear layer whose outputs are heads. Keys stay last in memory: `LayerEncoding.bias` says why."""

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, N, K, num_inputs] to [B, num_outputs, N, K]."""
        weight = self.weight.expand(x.shape[0], -1, -1)
        return torch.baddbmm(self.bias[:, None], weight, x.flatten(1, 2).mT).unflatten(-1, x.shape[1:3])


class FIRELayer(LayerEncoding):
    """b_ij = f(psi(p_i - p_j) / psi(max(p_i, L))), psi(x) = log(|c x| + 1), f a network 1 -> width -> H."""

    scalars = ("c", "threshold_factor")

    def __init__(self, options: FIREOptions, num_heads: int):
        super().__init__()
        self.options = options
        # inner activations are as many per head
        self.bias_copies = 4 + 3 * options.width / num_heads
        self.inner = SmallLinear(1, options.width)
        self.outer = HeadsFirst(options.width, num_heads)
        self.c = nn.Parameter(torch.empty(1))
        self.threshold_factor = nn.Parameter(torch.empty(1))

    def reset_parameters(self, std: float) -> None:
        # torch's initialisation, as in the authors' listing: small weights without biases would make f linear
        for linear in (self.inner, self.outer):
            bound = linear.weight.shape[1] ** -0.5
            nn.init.uniform_(linear.weight, -bound, bound)
            nn.init.uniform_(linear.bias, -bound, bound)
        nn.init.constant_(self.c, self.options.initial_c)
        nn.init.constant_(self.threshold_factor, 1.0)

    def bias(
        self, query: Tensor, key: Tensor, state: Tensor | None, positions: Positions, key_ids: Tensor,
        visible: Tensor, scale: float,
    ) -> Tensor:  # fmt: skip
        exact = position_dtype(query.device)
        ids = positions.ids[:, :, None].to(exact)
        distance = (ids - key_ids[:, None, :]).clamp(min=0)
        c = self.c.to(exact)
        threshold = (self.threshold_factor.to(exact) * self.options.initial_threshold).abs()
        normaliser = torch.log((c * torch.maximum(ids, threshold)).abs() + 1) + 1e-6
        relative = torch.log((c * distance).abs() + 1) / normaliser
        hidden = torch.relu(self.inner(relative[..., None].to(self.inner.weight.dtype)))
        return self.outer(hidden)


@register_encoding("fire")
class FIRE(PositionalEncoding):
    """One network per layer. Normalising by p_i depends on absolute positions."""

    idea = "a small network of the distance over the query's position"
    options_class = FIREOptions
    options: FIREOptions
    backends = ("eager", "sdpa")
    adds_bias = True
    needs_causal = True
    shift_invariant = False

    def layer(self, index: int) -> LayerEncoding:
        return FIRELayer(self.options, self.geometry.num_heads)
