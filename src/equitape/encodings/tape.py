"""TAPE: a field of phasors, one complex number per token, key-value head and frequency, averaged by attention and
mixed by content (docs/reference/encodings/tape.md).

1. start   z = exp(i theta_m p)
2. rotate  q~ = z q, k~ = z k
3. attend  softmax(q~ k~^T / sqrt D) [v | z] -> [o | c]
4. move    z + gamma z conj(A c) (B c), optional: move by the distance between what two mixtures of heads attend to
5. carry   z' = z + W_a c
6. mix     z'' = z' + W_2 diag(psi(x)) W_1 z',  psi(x) = silu(W_x x)

All mixing is over heads, never over frequencies: rotating all z of one frequency by the same angle changes no score
and rotates every later z by that angle. This equivariance implies shift invariance.

Shapes: B batch, N tokens, H query heads, G key-value heads, D head dimension, C hidden size, I mixer size.
"""

import math
import random
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from ..kernels import fuses_token, move_field, put_frequencies, take_frequencies, update_field, update_token
from ..settings import Positive
from .base import LayerEncoding, register_encoding
from .clock import clock_positions
from .columns import ColumnsEncoding, RotaryLayer
from .frequencies import Base, Scaling, axis_frequencies, check_rotary, position_dtype, softmax_scale, spread_over_axes
from .options import Geometry
from .packed import pack, unpack
from .phasors import multiply, phasors
from .positions import Positions
from .values import RotaryOptions


@dataclass(frozen=True, kw_only=True)
class TapeOptions(RotaryOptions):
    """Options of TAPE. The defaults are the paper's model at L = R = 2."""

    kind: ClassVar[str] = "tape"
    theta: Base = 10000.0
    scaling: Scaling = field(default_factory=Scaling)
    """Scaling of the initial phasors."""
    init: Literal["rope", "fourier"] = "rope"
    """Initial field: "rope", or "fourier" (random frequencies and amplitudes)."""
    seed: int = 0
    """Seed of the random Fourier features."""
    layers: str | tuple[int, ...] = "all"
    """Blocks that update the field: "all", "first_and_middle" (the first block and the middle third), "last_half" or a
    list of indices. The last block never does."""
    attention_update: bool = True
    """Step 5."""
    mlp_update: bool = True
    """Step 6."""
    move: bool = False
    """Step 4."""
    mixer_size: Positive | None = None
    """I. Default: four times the number of key-value heads."""
    source: Literal["attention", "mlp"] = "attention"
    """Input of psi: normalised features after "attention", as in the paper, or the "mlp" output, as in its code."""
    normalize: bool = False
    """Divide the field of every token and head by its root mean square over frequencies after each update."""
    complex_mixing: bool = False
    """Complex W_a, W_1, W_2: a token may shift its own phase. Still equivariant."""
    carried_frequencies: Positive | None = None
    """Number of frequencies that updates act on, spread evenly over all. Attention carries them inside the value's own
    width, so it costs what RoPE's does, and values have twice as many fewer channels for content. The other frequencies
    stay as they start. Default: all frequencies, appended to the value."""
    init_scale: float = 0.0
    """Initial standard deviation of W_a, W_2 and gamma, in units of 1 / sqrt(fan-in). Zero starts as RoPE."""

    def check(self, geometry: Geometry) -> None:
        check_rotary(self.kind, self.scaling, geometry)
        self.check_decay(self.kind, geometry)
        self.check_values(self.kind, geometry)
        if self.scaling.kind == "dynamic":
            raise ValueError(
                f"Encoding {self.kind!r} carries its field in the cache, so the scaling cannot be 'dynamic'; use 'ntk'."
            )
        if self.init == "fourier" and self.scaling.kind not in ("default", "linear"):
            raise ValueError(
                f"Encoding {self.kind!r} with init 'fourier' has random frequencies; the scaling {self.scaling.kind!r} "
                f"does not apply to them: use 'linear' or init 'rope'."
            )
        count, frequencies = self.carried_frequencies, geometry.head_dim // 2
        if count is not None and not (self.attention_update or self.move):
            raise ValueError(
                f"Encoding {self.kind!r} has carried_frequencies, but attention carries nothing; set attention_update "
                f"or move to true."
            )
        if count is not None and (count == frequencies or frequencies % count):
            able = ", ".join(str(size) for size in range(1, frequencies) if frequencies % size == 0)
            raise ValueError(
                f"Encoding {self.kind!r} has carried_frequencies {count}; for heads of {geometry.head_dim} it must be "
                f"one of {able}."
            )
        if count is not None and self.rotate_values:
            raise ValueError(
                f"Encoding {self.kind!r} has carried_frequencies, which leave values too narrow to rotate; set "
                f"rotate_values to 0, or leave out carried_frequencies."
            )
        updating_blocks(self.layers, geometry)


def updating_blocks(layers: str | tuple[int, ...], geometry: Geometry) -> set[int]:
    """Indices of the blocks that update the field, without the last application of the last block, which nothing
    reads.
    """
    blocks = geometry.num_layers
    readable = blocks if geometry.num_loops > 1 else blocks - 1
    if layers == "all":
        return set(range(readable))
    if layers == "last_half":
        return set(range(blocks // 2, readable))
    if layers == "first_and_middle":
        return {0, *range(blocks // 3, 2 * blocks // 3)} & set(range(readable))
    if isinstance(layers, str):
        raise ValueError(
            f"TAPE has layers {layers!r}; use 'all', 'first_and_middle', 'last_half' or a list of block indices."
        )
    wrong = sorted(index for index in layers if not (isinstance(index, int) and 0 <= index < readable))
    if wrong:
        raise ValueError(
            f"TAPE cannot update the field in blocks {wrong}; allowed: 0 to {readable - 1} "
            f"(nothing would read an update by the last block)."
        )
    return set(layers)


def draw_fourier_features(options: TapeOptions, geometry: Geometry) -> tuple[list[float], list[list[float]]]:
    """Frequencies [M], log-uniform from 1 down to 1 / theta, and complex amplitudes [G, D] of mean square 1."""
    draw = random.Random(options.seed)
    factor = options.scaling.factor if options.scaling.kind == "linear" else 1.0
    frequencies = [options.theta ** -draw.random() / factor for _ in range(geometry.head_dim // 2)]
    amplitudes = [
        [draw.gauss(0.0, math.sqrt(0.5)) for _ in range(geometry.head_dim)] for _ in range(geometry.num_kv_heads)
    ]
    return frequencies, amplitudes


class AlignedLinear(nn.Linear):
    """A linear layer with few outputs. In half precision on a GPU, outputs are zero-padded to a multiple of 8.

    Matrix products need rows of 16 bytes; with 12 gates of three key-value heads, they are several times slower.
    """

    def forward(self, x: Tensor) -> Tensor:
        missing = -self.out_features % 8
        half = x.is_cuda and (self.weight.itemsize == 2 or torch.is_autocast_enabled("cuda"))
        if not (missing and half):
            return super().forward(x)
        padded = nn.functional.pad(self.weight, (0, 0, 0, missing))
        return nn.functional.linear(x, padded)[..., : self.out_features]


class TapeLayer(RotaryLayer):
    """Rotation in every block; move, carry and mix in those that update."""

    def __init__(self, options: TapeOptions, geometry: Geometry, updates: bool, keeps_clock: bool = False):
        super().__init__(options, geometry, keeps_clock)
        self.options = options
        self.head_dim = geometry.head_dim
        self.moves = updates and options.move
        self.carries = updates and options.attention_update
        self.mixes = updates and options.mlp_update
        if options.carried_frequencies is not None and (self.moves or self.carries):
            self.value_room = 2 * options.carried_frequencies
        heads, groups = geometry.num_heads, geometry.num_kv_heads
        mixer = options.mixer_size or 4 * groups
        # complex weights hold their real and imaginary parts in a leading axis
        parts = (2,) if options.complex_mixing else ()
        if self.moves:
            # logits of two mixtures of query heads per key-value head, and the strength of the move
            self.move_heads = nn.Parameter(torch.empty(2, groups, heads))
            self.move_gain = nn.Parameter(torch.empty(groups))
        if self.carries:
            self.carry = nn.Parameter(torch.empty(*parts, groups, heads))
        if self.mixes:
            self.mix_in = nn.Parameter(torch.empty(*parts, mixer, groups))
            self.mix_out = nn.Parameter(torch.empty(*parts, groups, mixer))
            self.gate = AlignedLinear(geometry.hidden_size, mixer, bias=False)

    @property
    def updates_state(self) -> bool:
        return self.moves or self.carries or self.mixes

    def reset_parameters(self, std: float) -> None:
        super().reset_parameters(std)
        scale = self.options.init_scale
        if self.moves:
            # initialise the two mixtures differently: equal ones would move nothing and get equal gradients
            nn.init.normal_(self.move_heads)
            nn.init.normal_(self.move_gain, std=scale)
        if self.carries:
            nn.init.normal_(self.carry, std=scale / math.sqrt(self.carry.shape[-1]))
        if self.mixes:
            nn.init.normal_(self.mix_in, std=1 / math.sqrt(self.mix_in.shape[-1]))
            nn.init.normal_(self.mix_out, std=scale / math.sqrt(self.mix_out.shape[-1]))

    def extra_values(self, state: Tensor | None) -> Tensor | None:
        if state is None or not (self.carries or self.moves):
            return None
        field, changed = self.parts(state)
        return field if changed is None else changed

    def parts(self, state: Tensor) -> tuple[Tensor, Tensor | None]:
        count = self.options.carried_frequencies
        if count is None:
            return state, None
        start, changed = unpack(state, self.num_kv_heads, self.head_dim, count)
        # only a clock trains what the field starts with
        return start if self.options.clock else start.detach(), changed

    def update(
        self, state: Tensor | None, attended_state: Tensor | None, normed_hidden: Tensor, mlp_output: Tensor
    ) -> Tensor | None:
        assert state is not None
        if not self.updates_state:
            return state
        field, changed = self.parts(state)
        if changed is None:
            return self._updated(field, attended_state, normed_hidden, mlp_output)
        return pack(field, self._updated(changed, attended_state, normed_hidden, mlp_output))

    def _updated(
        self, state: Tensor, attended_state: Tensor | None, normed_hidden: Tensor, mlp_output: Tensor
    ) -> Tensor:
        if self.moves:
            assert attended_state is not None
            source, target = self.move_heads.softmax(-1)
            state = move_field(state, attended_state, source, target * self.move_gain[:, None])
        if not (self.carries or self.mixes):
            return update_field(state, None, None, None, None, None, normalize=self.options.normalize)
        carry = self.carry if self.carries else None
        if not self.mixes:
            return update_field(state, attended_state, None, carry, None, None, normalize=self.options.normalize)
        features = normed_hidden if self.options.source == "attention" else mlp_output
        mixing = (carry, self.mix_in, self.mix_out)
        # a replaced gate (quantised or with LoRA) computes by itself
        if type(self.gate) is AlignedLinear and fuses_token(state, features, self.gate.weight):
            weight = self.gate.weight
            return update_token(state, attended_state, features, weight, *mixing, normalize=self.options.normalize)
        return update_field(state, attended_state, self.gate(features), *mixing, normalize=self.options.normalize)


@register_encoding("tape")
class Tape(ColumnsEncoding):
    """The phasor form: equal to the paper's tensors at L = R = 2, with half the state."""

    idea = "a field of phasors, updated in each block by attention and content"
    options_class = TapeOptions
    options: TapeOptions
    needs_even_head_dim = True
    takes_axes = True
    has_field = True

    def __init__(self, options: TapeOptions, geometry: Geometry):
        super().__init__(options, geometry, options)
        # plain numbers, not a buffer: a buffer would be rounded when the model is cast to half precision
        self.fourier_features = draw_fourier_features(options, geometry)

    @property
    def score_scale(self) -> float:
        return softmax_scale(self.options.scaling)

    @property
    def value_columns(self) -> list[int]:
        inside = self.options.carried_frequencies is not None
        return [0] * self.geometry.num_layers if inside else self.carried_columns

    @property
    def carried_columns(self) -> list[int]:
        carried = self.options.attention_update or self.options.move
        blocks = updating_blocks(self.options.layers, self.geometry) if carried else set()
        width = 2 * (self.options.carried_frequencies or self.geometry.head_dim // 2)
        return [width if index in blocks else 0 for index in range(self.geometry.num_layers)]

    def initial_state(self, positions: Positions, dtype: torch.dtype) -> Tensor:
        groups = self.geometry.num_kv_heads
        device = positions.ids.device
        if self.options.init == "rope":
            frequencies = axis_frequencies(self.geometry, self.options.theta, self.options.scaling, device)
            return self.state_of(phasors(clock_positions(positions, frequencies.dtype), frequencies, dtype))
        frequencies, amplitudes = self._fourier(device)
        waves = phasors(clock_positions(positions, frequencies.dtype), frequencies, frequencies.dtype)
        return self.state_of(multiply(waves.expand(-1, groups, -1, -1), amplitudes[None, :, None]).to(dtype))

    def state_of(self, field: Tensor) -> Tensor:
        groups, count = self.geometry.num_kv_heads, self.options.carried_frequencies
        if count is None:
            return field.expand(-1, groups, -1, -1)
        return pack(field, take_frequencies(field, count).expand(-1, groups, -1, -1))

    def field(self, state: Tensor) -> Tensor:
        count = self.options.carried_frequencies
        if count is None:
            return state
        return put_frequencies(*unpack(state, self.geometry.num_kv_heads, self.geometry.head_dim, count))

    @property
    def state_width(self) -> int | None:
        groups, count = self.geometry.num_kv_heads, self.options.carried_frequencies
        if count is None:
            return None
        different = groups if self.has_clock or self.options.init == "fourier" else 1
        return different * self.geometry.head_dim + 2 * count * groups

    def _fourier(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Random frequencies [M], or [A, M] with several axes, and complex amplitudes [G, D]."""
        exact = position_dtype(device)
        frequencies, amplitudes = (torch.tensor(drawn, device=device, dtype=exact) for drawn in self.fourier_features)
        return spread_over_axes(frequencies, self.geometry), amplitudes

    def layer(self, index: int) -> LayerEncoding:
        updates = index in updating_blocks(self.options.layers, self.geometry)
        return TapeLayer(self.options, self.geometry, updates, self.keeps_clock(index))
