"""Extra columns of queries and keys for decay and clock; their products are added to the scores.

Shapes: B batch, N tokens, H query heads, G key-value heads, D head dimension, C hidden size, E extra columns.
"""

import torch
from torch import Tensor, nn

from .base import LayerEncoding, PositionalEncoding
from .clock import clock_drift
from .decay import Decay, DecayOptions, count_columns
from .options import Geometry, Options
from .positions import Positions
from .running import split_parts


def put_columns(x: Tensor, columns: Tensor, inside: bool) -> Tensor:
    """Queries or keys [..., D] with columns [..., E] appended, or inside, replacing the lowest frequencies.

    Channels m and m + D / 2 belong to one frequency, so those are the last E / 2 of both halves.
    """
    if not inside:
        return torch.cat((x, columns), dim=-1)
    (first, second), (one, two) = x.chunk(2, dim=-1), columns.chunk(2, dim=-1)
    kept = first.shape[-1] - one.shape[-1]
    return torch.cat((first[..., :kept], one, second[..., :kept], two), dim=-1)


def take_columns(x: Tensor, count: int, inside: bool) -> Tensor:
    """The columns [..., E] that `put_columns` added."""
    if not inside:
        return x[..., x.shape[-1] - count :]
    return torch.cat([half[..., half.shape[-1] - count // 2 :] for half in x.chunk(2, dim=-1)], dim=-1)


class ColumnsLayer(LayerEncoding):
    """A block's encoding with a decay, and with the running sum of a clock if `keeps_clock` is set.

    The clock's columns come last. The query has zeros there, so they change no score and only store the sum in the
    cache.
    """

    def __init__(self, options: DecayOptions, geometry: Geometry, keeps_clock: bool = False):
        super().__init__()
        self.num_heads, self.num_kv_heads = geometry.num_heads, geometry.num_kv_heads
        self.keeps_clock = keeps_clock
        self.keeps_sums = keeps_clock or options.decay == "gate"
        self.inside = options.decay_inside
        self.num_columns = count_columns(options, keeps_clock)
        self.decay = Decay(options, geometry) if options.decay != "none" else None

    def reset_parameters(self, std: float) -> None:
        if self.decay is not None:
            self.decay.reset_parameters()

    def add_columns(
        self, query: Tensor, key: Tensor, hidden: Tensor, positions: Positions, last_key: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        width, dtype = self.num_columns, key.dtype
        if not width:
            return query, key
        previous = None if last_key is None else take_columns(last_key, width, self.inside)
        shape = (*key.shape[:3], -1)
        zero = torch.zeros((), device=key.device, dtype=dtype)
        of_query, of_key = zero.expand(self.num_heads, 0), zero.expand(*key.shape[:3], 0)
        if self.decay is not None:
            of_query, of_key = self.decay.columns(hidden, positions, previous, dtype, scale)
            of_key = of_key.expand(shape)
        clock = zero.expand(*key.shape[:3], 0)
        if self.keeps_clock:
            assert positions.drift is not None
            clock = split_parts(positions.drift.detach(), dtype)
        gap = zero.expand(*key.shape[:3], width - of_key.shape[-1] - clock.shape[-1])
        of_query = nn.functional.pad(of_query, (0, width - of_query.shape[-1]))[None, :, None]
        of_query = of_query.expand(*query.shape[:3], -1)
        of_key = torch.cat((of_key, gap, clock), dim=-1)
        return put_columns(query, of_query, self.inside), put_columns(key, of_key, self.inside)


class ColumnsEncoding(PositionalEncoding):
    """An encoding with a decay and, if `has_clock` is set, a clock."""

    def __init__(
        self,
        options: Options,
        geometry: Geometry,
        decay: DecayOptions,
        has_clock: bool = False,
        clock_speed: float = 1.0,
    ):
        super().__init__(options, geometry)
        self.decay = decay
        self.has_clock = has_clock
        self.clock_speed = clock_speed
        self.keeps_sums = has_clock or decay.decay == "gate"
        # the score gains with every step towards the last token, and a clock counts from the first
        self.needs_causal = has_clock or decay.decay != "none"
        # constant slopes count from the start of the sequence
        self.needs_extent = decay.decay in ("slopes", "learned")
        if self.has_clock:
            self.clock = nn.Parameter(torch.empty(geometry.num_kv_heads, geometry.hidden_size))

    def reset_parameters(self, std: float) -> None:
        if self.has_clock:
            nn.init.zeros_(self.clock)

    @property
    def key_columns(self) -> list[int]:
        if self.decay.decay_inside:
            return super().key_columns
        return [count_columns(self.decay, self.keeps_clock(index)) for index in range(self.geometry.num_layers)]

    def keeps_clock(self, index: int) -> bool:
        """Whether block `index` stores the clock's running sum in the cache."""
        return self.has_clock and index == 0

    def map_ids(self, positions: Positions, embeddings: Tensor, last_key: Tensor | None) -> Positions:
        if not self.has_clock:
            return positions
        width = count_columns(self.decay, keeps_clock=True)
        previous = None if last_key is None else take_columns(last_key, width, self.decay.decay_inside)
        drift = clock_drift(self.clock, embeddings, positions, previous, self.clock_speed)
        return positions._replace(drift=drift)
