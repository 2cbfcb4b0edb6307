"""FIRE: a small network of the distance, normalised by the query's position (docs/reference/encodings/fire.md)."""

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from ..settings import Gt, Positive
from .base import LayerEncoding, PositionalEncoding, ScoreMod, SmallLinear, register_encoding
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


class Readable(SmallLinear):
    """A linear layer that also returns what it has learned: outside `forward` it may be on the meta device."""

    def forward(self, x: Tensor | None) -> Tensor:
        """x: [..., num_inputs] to [..., num_outputs]; None to weights and biases, [num_outputs, num_inputs + 1]."""
        return torch.cat((self.weight, self.bias[:, None]), dim=1) if x is None else super().forward(x)


class HeadsFirst(Readable):
    """A linear layer whose outputs are heads. Keys stay last in memory: `LayerEncoding.bias` says why."""

    def forward(self, x: Tensor | None) -> Tensor:
        """x: [B, N, K, num_inputs] to [B, num_outputs, N, K]; None as above."""
        if x is None:
            return super().forward(None)
        weight = self.weight.expand(x.shape[0], -1, -1)
        return torch.baddbmm(self.bias[:, None], weight, x.flatten(1, 2).mT).unflatten(-1, x.shape[1:3])


def segments(inner: Tensor, outer: Tensor, exact: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """The network as straight lines between knots, which all heads share: (knots, slopes, intercepts).

    inner: [width, 2] and outer: [H, width + 1], weights and biases, to [P], [H, width + 1] and [H, width + 1], in
    `exact`. Knots are in order; P is a power of two above the width, and infinite knots fill it.
    """
    (weight, bias), outer = inner.to(exact).unbind(1), outer.to(exact)
    # infinite for a unit without a weight, or NaN, which comes last and is never reached
    knots, order = (-bias / weight).sort()
    weight, bias = weight[order], bias[order]
    width = len(weight)
    # segment s follows s knots; a unit is on after its knot if its weight is positive, and before it if negative
    place = torch.arange(width + 1, device=inner.device)
    on = torch.where(weight == 0, bias > 0, (place[:, None] > place[:-1]) == (weight > 0)).to(exact)
    units = outer[:, :-1][:, order]
    slope = (units * weight) @ on.mT
    intercept = (units * bias) @ on.mT + outer[:, -1:]
    return nn.functional.pad(knots, (0, 2 ** width.bit_length() - width), value=math.inf), slope, intercept


class FIRELayer(LayerEncoding):
    """b_ij = f(psi(p_i - p_j) / psi(max(p_i, L))), psi(x) = log(|c x| + 1), f a network 1 -> width -> H."""

    # the code is repeated for every score of a thread, so larger tiles take longer to compile and run out of registers;
    # pipelining would keep what is looked up for several tiles of scores in shared memory, more than a GPU has
    kernel_options = {
        "BLOCK_M": 64, "BLOCK_N": 32, "num_warps": 4, "num_stages": 1, "FORCE_USE_FLEX_ATTENTION": True
    }  # fmt: skip
    scalars = ("c", "threshold_factor")

    def __init__(self, options: FIREOptions, num_heads: int):
        super().__init__()
        self.options = options
        # inner activations are as many per head
        self.bias_copies = 4 + 3 * options.width / num_heads
        self.inner = Readable(1, options.width)
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
        relative = torch.log((c * distance).abs() + 1) / self._normaliser(ids, c)
        hidden = torch.relu(self.inner(relative[..., None].to(self.inner.weight.dtype)))
        return self.outer(hidden)

    def _normaliser(self, ids: Tensor, c: Tensor) -> Tensor:
        """psi(max(p, L)), kept from 0. ids: of the queries, floats as c."""
        threshold = (self.threshold_factor.to(ids.dtype) * self.options.initial_threshold).abs()
        return torch.log((c * torch.maximum(ids, threshold)).abs() + 1) + 1e-6

    def score_mod(self, state: Tensor | None, positions: Positions, key_ids: Tensor) -> ScoreMod:
        if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in self.parameters()):
            # it would add the gradient of every score to the same few addresses, one atomic operation after the other
            raise ValueError(
                "FlexAttention cannot train encoding 'fire'; use attention 'sdpa' with a dense mask, or compute "
                "without gradients, under torch.no_grad()."
            )
        rows = key_ids.shape[0]
        ids = positions.ids.expand(rows, -1)
        wide = torch.promote_types(self.inner.weight.dtype, torch.float32)
        exact = position_dtype(ids.device)
        factor = self._normaliser(ids.to(exact), self.c.to(exact)).reciprocal().to(wide)
        knots, slope, intercept = (each.to(wide) for each in segments(self.inner(None), self.outer(None), exact))
        c = self.c.abs().to(wide)
        steps = [2**power for power in reversed(range(self.options.width.bit_length()))]

        def add_bias(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            row = batch if rows > 1 else torch.zeros_like(batch)
            distance = (ids[row, query] - key_ids[row, key]).clamp(min=0).to(wide)
            # indices are tensors, as the compiler needs them
            segment = torch.zeros_like(head)
            relative = torch.log(c[segment] * distance + 1) * factor[row, query]
            for step in steps:
                segment = segment + step * (knots[segment + (step - 1)] <= relative).to(segment.dtype)
            return score + (intercept[head, segment] + slope[head, segment] * relative)

        return add_bias


@register_encoding("fire")
class FIRE(PositionalEncoding):
    """One network per layer. Normalising by p_i depends on absolute positions."""

    idea = "a small network of the distance over the query's position"
    options_class = FIREOptions
    options: FIREOptions
    adds_bias = True
    needs_causal = True
    shift_invariant = False

    def layer(self, index: int) -> LayerEncoding:
        return FIRELayer(self.options, self.geometry.num_heads)
