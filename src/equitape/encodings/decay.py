"""Decay: scores decrease with the distance between query and key, as in ALiBi and the Forgetting Transformer (FoX).

score_ij - (L_i - L_j), where L grows along the sequence. L_i is the same for all keys of a query and cancels in the
softmax, so only + L_j is needed: a product of extra columns, with L_j in the key and a constant in the query. Attention
kernels need neither a mask nor a bias for it.

While slopes are trained, queries have - L_i too, against a constant column of the key. In backward, fused kernels round
the gradients of scores to half precision. A row of them then does not add up to zero, and L_j would multiply the
remainder: at 1,024 tokens, gradients of slopes would be off by 40 %. With - L_i, the distance multiplies it.

Shapes: B batch, N tokens, H query heads, G key-value heads, D head dimension, C hidden size, E extra columns.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from ..settings import Gt, Le, Lt
from .options import Geometry, Options
from .positions import Positions
from .running import COLUMN_UNIT, PARTS, join_parts, leading_parts, running_sum, split_parts, without_autocast

ALIGNMENT = 8
"""Attention kernels need widths in multiples of this; added columns are zero-padded."""
ANCHOR = 4096.0
"""The constant column of keys, by which queries subtract L_i. Float16 then covers positions up to 33 million."""


@dataclass(frozen=True, kw_only=True)
class DecayOptions(Options):
    """Options of encodings with an optional decay."""

    decay: Literal["none", "slopes", "learned", "gate"] = "none"
    """How scores decrease with distance: "none"; "slopes", ALiBi's constant slope per head; "learned", such slopes
    trained in every block; "gate", a forget gate that reads the content, as in FoX. All start as ALiBi's slopes."""
    decay_heads: Annotated[float, Gt(0), Le(1)] = 1.0
    """Fraction of heads that decay; the others treat all distances alike."""
    decay_speed: Annotated[float, Gt(0)] = 1.0
    """Learning speed of learned slopes relative to other weights: slopes are softplus(decay_speed * parameter)."""
    decay_slowest: Annotated[float, Gt(0), Lt(1)] = 2**-8
    """Slope of the head that decays most slowly, at the start if slopes are learned. The others spread geometrically
    between 1 and it: head h of H has decay_slowest^(h / H). ALiBi's is 2^-8."""
    decay_inside: bool | Literal["decaying"] = False
    """Let the columns of decay and clock replace the lowest frequencies instead of widening heads: attention then costs
    nothing extra. Each head has 4 fewer channels for content; in the first block with a clock 8, or 6 with a gate.
    "decaying": only in key-value heads with a query head that decays; the others keep their lowest frequencies. The
    first block with a clock has columns in all heads."""

    def check_decay(self, kind: str, geometry: Geometry) -> None:
        """Raise ValueError for a fraction of less than one head, and for columns that do not fit in a head."""
        if geometry.num_axes > 1 and (self.decay != "none" or getattr(self, "clock", False)):
            raise ValueError(
                f"Encoding {kind!r} with {geometry.num_axes} axes cannot have a decay or a clock, which count tokens "
                f"along one; set decay to 'none' and clock to false."
            )
        needed = count_columns(self, getattr(self, "clock", False)) + 2
        if self.decay_inside and geometry.head_dim < needed:
            raise ValueError(
                f"Encoding {kind!r} with decay_inside needs head_dim {needed} or more, not {geometry.head_dim}."
            )
        heads = geometry.num_kv_heads if self.decay == "gate" else geometry.num_heads
        if round(self.decay_heads * heads) < 1:
            raise ValueError(
                f"Encoding {kind!r} has decay_heads {self.decay_heads}, which selects none of {heads} heads; raise it "
                f"to at least {1 / heads:.3g}."
            )


def count_columns(options: DecayOptions, keeps_clock: bool) -> int:
    """Number of columns of decay and clock in a block, with padding.

    Added columns hold the six largest of the products of two numbers in three parts each, and the anchor. Inside a
    head there are three and the anchor, and slopes are rounded to the model's dtype.
    """
    used = PARTS * keeps_clock
    if options.decay != "none":
        used += PARTS if options.decay == "gate" else PARTS + 1 if options.decay_inside else 7
    multiple = 2 if options.decay_inside else ALIGNMENT
    return -(-used // multiple) * multiple


def alibi_slopes(count: int, device: torch.device, slowest: float = 2**-8) -> Tensor:
    """ALiBi's slopes: [count], float64.

    slowest^(h / H) for H a power of two; otherwise those of the power below, then every other one of the power above.
    Computed on the device: a CUDA graph cannot capture a copy from the host.
    """
    below = 2 ** math.floor(math.log2(count))
    steps = torch.arange(2, 2 * below + 1, 2, device=device, dtype=torch.float64)
    if count > below:
        steps = torch.cat((steps, torch.arange(1, 2 * (count - below), 2, device=device, dtype=torch.float64)))
    return torch.exp2(steps * (math.log2(slowest) / (2 * below)))


def distance_columns(positions: Positions, dtype: torch.dtype, count: int, inside: bool) -> Tensor:
    """Key columns for slopes, [B, 1, N, count]: ids in three parts, in the order that the columns of queries have."""
    parts = split_parts(_places(positions), dtype)[:, None]
    used = parts if inside else torch.cat((parts, parts[..., :2], parts[..., :1]), dim=-1)
    others = used.new_zeros(count - used.shape[-1])
    others[0] = ANCHOR
    # a concatenation, which the compiler makes once for all blocks; it would compute padding in every block
    return torch.cat((used, others.expand(*used.shape[:-1], -1)), dim=-1)


def _places(positions: Positions) -> Tensor:
    """Ids [B, N] counted from the start of the sequence: a shift of all ids changes nothing, not even rounding."""
    assert positions.origin is not None
    return positions.ids - positions.origin


def _columns_of_slopes(rates: Tensor, unit: float, dtype: torch.dtype, inside: bool) -> Tensor:
    """Query columns for slopes [H]: [H, 1, E]. Inside a head the slope three times, to be rounded to `dtype`; else its
    three parts, the high one three times, the medium one twice.
    """
    factors = rates.detach() * unit
    if inside:
        return factors[:, None, None].expand(-1, -1, PARTS)
    high, medium = leading_parts(factors, dtype)
    low = factors - high - medium
    if not torch.compiler.is_compiling():
        return torch.stack((high, high, high, medium, medium, low), dim=-1)[:, None]
    # the compiler makes a kernel for every part of a stack, and computes this where it is used
    place = torch.arange(6, device=factors.device)
    return torch.where(place < 3, high[:, None], torch.where(place < 5, medium[:, None], low[:, None]))[:, None]


def _trained_columns(of_query: Tensor, rates: Tensor, unit: float, places: Tensor, scale: float) -> Tensor:
    """Query columns [H, 1, E] with - L_i behind them, and the gradients of slopes [H]: [B, H, N, E + 1] in float32.

    places: L of a slope of one, [B, 1, N]. The gradient goes through - L_i and through the first three columns. All
    columns are a slope times a weight, so it is a single sum over tokens and columns, in float32.
    """
    own = places[..., None] * (-1 / (ANCHOR * scale))
    width = of_query.shape[-1]
    place = torch.arange(width + 1, device=own.device)
    weights = torch.where(place == width, own, torch.where(place < PARTS, unit, 0.0).to(own))
    slopes = rates[:, None, None]
    exact = torch.where(place == width, slopes.detach() * own, nn.functional.pad(of_query, (0, 1)))
    return exact + (slopes - slopes.detach()) * weights


class Decay(nn.Module):
    """The decay of one block: columns for its queries and keys."""

    def __init__(self, options: DecayOptions, geometry: Geometry):
        super().__init__()
        self.kind = options.decay
        self.inside = bool(options.decay_inside)
        self.speed = options.decay_speed if self.kind == "learned" else 1.0
        self.num_heads, self.num_kv_heads = geometry.num_heads, geometry.num_kv_heads
        heads = self.num_kv_heads if self.kind == "gate" else self.num_heads
        self.heads, self.decaying = heads, round(options.decay_heads * heads)
        self.slowest = options.decay_slowest
        if self.kind in ("learned", "gate"):
            self.bias = nn.Parameter(torch.empty(heads))
        if self.kind == "gate":
            self.weight = nn.Parameter(torch.empty(heads, geometry.hidden_size))

    @property
    def decaying_groups(self) -> int:
        """Key-value heads, from the first on, with a query head that decays."""
        return -(-self.decaying * self.num_kv_heads // self.heads)

    def reset_parameters(self) -> None:
        """Start as ALiBi. A weight that transformers has loaded stays; its versions of `nn.init` skip such weights."""
        if self.kind in ("learned", "gate") and not getattr(self.bias, "_is_hf_initialized", False):
            with torch.no_grad():
                slopes = alibi_slopes(self.decaying, torch.device("cpu"), self.slowest).tolist()
                start = [math.log(math.expm1(slope)) for slope in slopes] + [0.0] * (self.heads - self.decaying)
                self.bias.copy_(torch.tensor(start) / self.speed)
        if self.kind == "gate":
            nn.init.zeros_(self.weight)

    def forward(
        self,
        hidden: Tensor,
        positions: Positions,
        previous: Tensor | None,
        dtype: torch.dtype,
        scale: float,
        count: int,
    ) -> tuple[Tensor, Tensor]:
        """Columns whose products are added to the scores.

        For queries [B, H, N, count] or [H, 1, count], for keys [B or 1, G or 1, N, count].

        hidden: [B, N, C], input of the query and key projections; previous: [B, G, E], columns of the last cached key.
        """
        # the softmax scale also multiplies these products
        unit = COLUMN_UNIT / scale
        if self.kind == "gate":
            of_query = hidden.new_full((self.num_heads, 1, PARTS), unit, dtype=dtype)
            of_key = split_parts(self._gated_sum(hidden, positions, previous), dtype)
            return _pad(of_query, count), _pad(of_key, count)
        # also in the first pass of reentrant checkpointing, which has gradients switched off
        trained = self.kind == "learned" and self.bias.requires_grad and (self.training or torch.is_grad_enabled())
        if self.kind == "learned":
            rates = nn.functional.softplus(self.speed * self.bias.to(self._wide(self.bias)))[: self.decaying]
        else:
            # not a buffer, which would be rounded when the model is cast to half precision
            rates = alibi_slopes(self.decaying, hidden.device, self.slowest).float()
        if self.decaying < self.heads:
            rates = nn.functional.pad(rates, (0, self.heads - self.decaying))
        of_query = _columns_of_slopes(rates, unit, dtype, self.inside)
        if trained:
            of_query = _trained_columns(of_query, rates, unit, _places(positions)[:, None].to(rates), scale)
        made = positions.distances
        if made is None or made.dtype != dtype or made.shape[-1] != count:
            made = distance_columns(positions, dtype, count, self.inside)
        return _pad(of_query.to(dtype), count), made

    def _gated_sum(self, hidden: Tensor, positions: Positions, previous: Tensor | None) -> Tensor:
        """L, the running sum of what the forget gates read: [B, G, N]."""
        with without_autocast(hidden.device):
            read = nn.functional.linear(hidden.to(self._wide(hidden)), self.weight.to(self._wide(hidden)))
            increments = nn.functional.softplus(read + self.bias.to(read))
        before = None if previous is None else join_parts(previous[..., :PARTS])
        total = running_sum(increments.transpose(1, 2), positions, before)
        if self.decaying == self.heads:
            return total
        # at the end: cached heads without columns have other numbers in their place
        return torch.where(torch.arange(self.heads, device=hidden.device)[:, None] < self.decaying, total, 0.0)

    @staticmethod
    def _wide(x: Tensor) -> torch.dtype:
        return torch.promote_types(x.dtype, torch.float32)


def _pad(columns: Tensor, count: int) -> Tensor:
    """Columns [..., E] padded with zeros to `count`."""
    return nn.functional.pad(columns, (0, count - columns.shape[-1]))
