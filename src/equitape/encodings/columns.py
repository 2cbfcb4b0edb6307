"""Extra columns of queries and keys for decay and clock; their products are added to the scores.

Shapes: B batch, N tokens, H query heads, G key-value heads, D head dimension, C hidden size, E extra columns.
"""

import torch
from torch import Tensor, nn

from .base import LayerEncoding, PositionalEncoding
from .clock import ClockOptions, clock_drift
from .decay import Decay, DecayOptions, count_columns, distance_columns
from .heads import Columns, take_columns
from .options import Geometry, Options
from .phasors import apply_rotary
from .positions import Positions
from .running import PARTS, split_parts
from .values import RotaryOptions


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
        self.num_columns = count_columns(options, keeps_clock)
        self.decay = Decay(options, geometry) if options.decay != "none" else None
        # as `Columns.inside`
        self.inside = geometry.num_kv_heads if options.decay_inside else None
        if options.decay_inside == "decaying" and self.decay is not None and not keeps_clock:
            self.inside = self.decay.decaying_groups

    def reset_parameters(self, std: float) -> None:
        if self.decay is not None:
            self.decay.reset_parameters()

    def columns(
        self, hidden: Tensor, positions: Positions, last_key: Tensor | None, dtype: torch.dtype, scale: float
    ) -> Columns | None:
        if not self.num_columns:
            return None
        previous = None if last_key is None else take_columns(last_key, self.num_columns, self.inside is not None)
        room = self.num_columns - PARTS * self.keeps_clock
        if self.decay is not None:
            of_query, of_key = self.decay(hidden, positions, previous, dtype, scale, room)
        else:
            of_query, of_key = (
                hidden.new_zeros(shape, dtype=dtype) for shape in ((1, self.num_heads, 1, room), (1, 1, 1, room))
            )
        if self.keeps_clock:
            assert positions.drift is not None
            clock = split_parts(positions.drift.detach(), dtype)
            of_query = nn.functional.pad(of_query, (0, PARTS))
            of_key = torch.cat((of_key.expand(*clock.shape[:3], -1), clock), dim=-1)
        return Columns(of_query if of_query.dim() == 4 else of_query[None], of_key, self.inside)


class RotaryLayer(ColumnsLayer):
    """q~ = z q, k~ = z k, with channels (m, m + D / 2) as a complex number; z is the state."""

    def __init__(self, options: RotaryOptions, geometry: Geometry, keeps_clock: bool = False):
        super().__init__(options, geometry, keeps_clock)
        self.value_heads = options.value_heads(geometry)

    def parts(self, state: Tensor) -> tuple[Tensor, Tensor | None]:
        """z, and the numbers of those frequencies of it that have changed since the start, if they are separate."""
        return state, None

    def rotate(self, query: Tensor, key: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        assert state is not None
        field, changed = self.parts(state)
        return apply_rotary(query, key, field, changed=changed)

    def rotate_with_columns(
        self, query: Tensor, key: Tensor, state: Tensor | None, columns: Columns
    ) -> tuple[Tensor, Tensor]:
        assert state is not None
        field, changed = self.parts(state)
        return apply_rotary(query, key, field, columns, changed)


def column_dtype(x: Tensor) -> torch.dtype:
    """The dtype of queries and keys of tokens x: autocast's, if it is on."""
    kind = x.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return x.dtype


class ColumnsEncoding(PositionalEncoding):
    """An encoding with a decay and, if its options are those of a clock and switch it on, a clock."""

    def __init__(self, options: Options, geometry: Geometry, decay: DecayOptions):
        super().__init__(options, geometry)
        self.decay = decay
        self.clock_options = decay if isinstance(decay, ClockOptions) else ClockOptions()
        self.has_clock = self.clock_options.clock
        self.keeps_sums = self.has_clock or decay.decay == "gate"
        self.keeps_numbers = self.has_clock or decay.decay != "none"
        # the score gains with every step towards the last token, and a clock counts from the first
        self.needs_causal = self.has_clock or decay.decay != "none"
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
        if self.decay.decay in ("slopes", "learned") and positions.origin is not None:
            width = count_columns(self.decay, keeps_clock=False)
            columns = distance_columns(positions, column_dtype(embeddings), width, bool(self.decay.decay_inside))
            positions = positions._replace(distances=columns)
        if not self.has_clock:
            return positions
        width = count_columns(self.decay, keeps_clock=True)
        previous = None if last_key is None else take_columns(last_key, width, bool(self.decay.decay_inside))
        drift = clock_drift(self.clock, embeddings, positions, previous, self.clock_options)
        return positions._replace(drift=drift)
