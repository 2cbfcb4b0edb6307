"""What decay and clock add to queries and keys: extra columns whose products are added to the scores.

Shapes: B batch, N tokens, H query heads, G key-value heads, D head dimension, C hidden size, E extra columns.
"""

import torch
from torch import Tensor, nn

from .base import LayerEncoding, PositionalEncoding
from .clock import clock_drift
from .decay import DECAY_COLUMNS, Decay, DecayOptions
from .options import Geometry, Options
from .positions import Positions
from .running import PARTS, split_parts

ALIGNMENT = 8
"""Attention kernels want widths in multiples of this; the columns are filled up with zeros."""


def count_columns(options: DecayOptions, keeps_clock: bool) -> int:
    """E of a block, zeros included."""
    used = DECAY_COLUMNS[options.decay] + PARTS * keeps_clock
    return -(-used // ALIGNMENT) * ALIGNMENT


class ColumnsLayer(LayerEncoding):
    """A block's encoding with a decay, and with the running sum of a clock if `keeps_clock` is set.

    The clock's columns come last. They meet zeros in the query: they change no score and only take the sum along into
    the cache.
    """

    def __init__(self, options: DecayOptions, geometry: Geometry, keeps_clock: bool = False):
        super().__init__()
        self.num_heads, self.num_kv_heads = geometry.num_heads, geometry.num_kv_heads
        self.keeps_clock = keeps_clock
        self.num_columns = count_columns(options, keeps_clock)
        self.decay = Decay(options, geometry) if options.decay != "none" else None

    def reset_parameters(self, std: float) -> None:
        if self.decay is not None:
            self.decay.reset_parameters()

    def score_columns(
        self, hidden: Tensor, positions: Positions, previous: Tensor | None, dtype: torch.dtype, scale: float
    ) -> tuple[Tensor, Tensor] | None:
        width = self.num_columns
        if not width:
            return None
        batch, num_tokens = hidden.shape[:2]
        shape = (batch, self.num_kv_heads, num_tokens)
        zero = torch.zeros((), device=hidden.device, dtype=dtype)
        of_query, of_key = zero.expand(self.num_heads, 0), zero.expand(*shape, 0)
        if self.decay is not None:
            of_query, of_key = self.decay.columns(hidden, positions, previous, dtype, scale)
            of_key = of_key.expand(*shape, -1)
        clock = zero.expand(*shape, 0)
        if self.keeps_clock:
            assert positions.drift is not None
            clock = split_parts(positions.drift.detach(), dtype)
        gap = zero.expand(*shape, width - of_key.shape[-1] - clock.shape[-1])
        query_columns = nn.functional.pad(of_query, (0, width - of_query.shape[-1]))[None, :, None]
        return query_columns.expand(batch, -1, num_tokens, -1), torch.cat((of_key, gap, clock), dim=-1)


class ColumnsEncoding(PositionalEncoding):
    """An encoding with a decay and, if `has_clock` is set, a clock."""

    def __init__(self, options: Options, geometry: Geometry, decay: DecayOptions, has_clock: bool = False):
        super().__init__(options, geometry)
        self.decay = decay
        self.has_clock = has_clock
        self.keeps_sums = has_clock or decay.decay == "gate"
        # constant slopes count from the start of the sequence
        self.needs_extent = decay.decay in ("slopes", "learned")
        if self.has_clock:
            self.clock = nn.Parameter(torch.empty(geometry.num_kv_heads, geometry.hidden_size))

    def reset_parameters(self, std: float) -> None:
        if self.has_clock:
            nn.init.zeros_(self.clock)

    @property
    def key_columns(self) -> list[int]:
        return [count_columns(self.decay, self.keeps_clock(index)) for index in range(self.geometry.num_layers)]

    def keeps_clock(self, index: int) -> bool:
        """Whether block `index` takes the clock's running sum into the cache."""
        return self.has_clock and index == 0

    def map_ids(self, positions: Positions, embeddings: Tensor, previous: Tensor | None) -> Positions:
        if not self.has_clock:
            return positions
        return positions._replace(drift=clock_drift(self.clock, embeddings, positions, previous))
