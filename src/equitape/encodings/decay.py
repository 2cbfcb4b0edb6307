"""Decay: scores decrease with the distance between query and key, as in ALiBi and the Forgetting Transformer (FoX).

score_ij - (L_i - L_j), where L grows along the sequence. L_i is the same for all keys of a query and cancels in the
softmax, so only + L_j is needed: a product of extra columns, with L_j in the key and a constant in the query. Attention
kernels need neither a mask nor a bias for it.

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
from .running import COLUMN_UNIT, PARTS, join_parts, running_sum, split_parts, without_autocast, without_low_bits

ALIGNMENT = 8
"""Attention kernels need widths in multiples of this; added columns are zero-padded."""


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
    decay_inside: bool = False
    """Let the columns of decay and clock replace the lowest frequencies instead of widening heads: attention then costs
    nothing extra, and each head has 4 or 6 fewer channels for content."""

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

    Added columns hold the six largest of the products of two numbers in three parts each. Inside a head there are
    three, and slopes are rounded to the model's dtype.
    """
    used = PARTS * keeps_clock
    if options.decay != "none":
        used += PARTS if options.decay == "gate" or options.decay_inside else 6
    multiple = 2 if options.decay_inside else ALIGNMENT
    return -(-used // multiple) * multiple


def alibi_slopes(decaying: int, heads: int, device: torch.device, slowest: float = 2**-8) -> Tensor:
    """ALiBi's slopes of the heads that decay, then zeros: [heads], float64.

    slowest^(h / H) for H a power of two; otherwise those of the power below, then every other one of the power above.
    Computed on the device: a CUDA graph cannot capture a copy from the host.
    """
    below = 2 ** math.floor(math.log2(decaying))
    head = torch.arange(heads, device=device, dtype=torch.float64)
    exponents = torch.where(head < below, (head + 1) / below, (2 * (head - below) + 1) / (2 * below))
    return torch.exp2(math.log2(slowest) * exponents) * (head < decaying)


class Decay(nn.Module):
    """The decay of one block: columns for its queries and keys."""

    def __init__(self, options: DecayOptions, geometry: Geometry):
        super().__init__()
        self.kind = options.decay
        self.inside = options.decay_inside
        self.speed = options.decay_speed if self.kind == "learned" else 1.0
        self.num_heads, self.num_kv_heads = geometry.num_heads, geometry.num_kv_heads
        heads = self.num_kv_heads if self.kind == "gate" else self.num_heads
        self.heads, self.decaying = heads, round(options.decay_heads * heads)
        self.slowest = options.decay_slowest
        if self.kind in ("learned", "gate"):
            self.bias = nn.Parameter(torch.empty(heads))
        if self.kind == "gate":
            self.weight = nn.Parameter(torch.empty(heads, geometry.hidden_size))

    def reset_parameters(self) -> None:
        """Start as ALiBi."""
        if self.kind in ("learned", "gate"):
            with torch.no_grad():
                slopes = self._start(torch.device("cpu")).tolist()
                start = [math.log(math.expm1(slope)) if slope else 0.0 for slope in slopes]
                self.bias.copy_(torch.tensor(start) / self.speed)
        if self.kind == "gate":
            nn.init.zeros_(self.weight)

    def columns(
        self, hidden: Tensor, positions: Positions, previous: Tensor | None, dtype: torch.dtype, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Columns whose products are added to the scores: for queries [H, E], for keys [B or 1, G or 1, N, E].

        hidden: [B, N, C], input of the query and key projections; previous: [B, G, E], columns of the last cached key.
        """
        device = hidden.device
        # not a buffer, which would be rounded when the model is cast to half precision
        fixed = self._start(device).float()
        # the softmax scale also multiplies these products
        unit = COLUMN_UNIT / scale
        if self.kind == "gate":
            with without_autocast(device):
                read = nn.functional.linear(hidden.to(self._wide(hidden)), self.weight.to(self._wide(hidden)))
                increments = nn.functional.softplus(read + self.bias.to(read)) * (fixed > 0)
            before = None if previous is None else join_parts(previous[..., :PARTS])
            total = running_sum(increments.transpose(1, 2), positions, before)
            of_query = torch.full((self.num_heads, PARTS), unit, device=device, dtype=dtype)
            return of_query, split_parts(total, dtype)
        rates = fixed
        if self.kind == "learned":
            rates = nn.functional.softplus(self.speed * self.bias.to(self._wide(self.bias))) * (fixed > 0)
        assert positions.origin is not None
        # counted from the start of the sequence: a shift of all ids changes nothing, not even rounding
        if self.inside:
            of_query = (rates * unit).to(dtype)[:, None].expand(-1, PARTS)
            return of_query, split_parts(positions.ids - positions.origin, dtype)[:, None]
        near, middle, far = split_parts(positions.ids - positions.origin, dtype)[:, None].unbind(-1)
        exact = (rates * unit).detach()
        first = without_low_bits(exact, dtype)
        second = without_low_bits(exact - first, dtype)
        # the gradient goes through the first part
        high, medium, low = first + (rates * unit - exact), second, exact - first - second
        of_query = torch.stack((high, high, high, medium, medium, low), dim=-1).to(dtype)
        return of_query, torch.stack((near, middle, far, near, middle, near), dim=-1)

    def _start(self, device: torch.device) -> Tensor:
        """Slopes at the start [heads], zero in heads that do not decay."""
        return alibi_slopes(self.decaying, self.heads, device, self.slowest)

    @staticmethod
    def _wide(x: Tensor) -> torch.dtype:
        return torch.promote_types(x.dtype, torch.float32)
