"""TensorTape: the paper's general form, a tensor e in R^{L x R} per token, head and block of channels.

Readable, slower, and independent of the phasor form: an oracle for it, and the paper's ablations
(docs/reference/encodings/tensor_tape.md).

Shapes: B batch, N tokens, H query heads, G key-value heads, M = D / L blocks of L channels, R components.
The state is [B, G, N, M * L * R]. Channel l of block m is number l * M + m of the head: the half-split layout at L = 2.
"""

import math
import random
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from ..settings import Positive
from .base import LayerEncoding, PositionalEncoding, register_encoding
from .frequencies import UNSCALED, Base, axis_frequencies, check_rotary, position_dtype
from .options import Geometry, Options
from .phasors import angles_on_axes
from .positions import Positions

MIXINGS = {
    "heads": "g",
    "heads+channels": "gl",
    "heads+components": "gr",
    "maximal": "gml",
}
"""Axes that W_1 and W_2 mix over. The paper's experiments use "heads"."""


@dataclass(frozen=True, kw_only=True)
class TensorTapeOptions(Options):
    """Options of the tensor form."""

    channels: Positive = 2
    """L."""
    components: Positive = 2
    """R."""
    theta: Base = 10000.0
    init: Literal["rope", "fourier"] = "rope"
    seed: int = 0
    mix_over: Literal["heads", "heads+channels", "heads+components", "maximal"] = "heads"
    attention_update: bool = True
    mlp_update: bool = True
    mixer_size: Positive | None = None
    init_scale: float = 0.0

    def check(self, geometry: Geometry) -> None:
        check_rotary("tensor_tape", UNSCALED, geometry)
        if geometry.num_axes > 1 and self.init != "rope":
            raise ValueError("Encoding 'tensor_tape' with several axes starts only as RoPE; use init='rope'.")
        if geometry.head_dim % self.channels:
            raise ValueError(
                f"Encoding 'tensor_tape' splits head_dim {geometry.head_dim} into blocks of channels={self.channels}, "
                f"which must divide it."
            )
        if self.init == "rope" and (self.channels, self.components) != (2, 2):
            raise ValueError(
                f"Encoding 'tensor_tape' starts as RoPE only with channels=2 and components=2; they are "
                f"{self.channels} and {self.components}. Use init='fourier'."
            )


def draw_fourier_features(options: TensorTapeOptions, blocks: int) -> tuple[list, list]:
    """Frequencies [M, R/2], log-uniform from 1 down to 1 / theta, and amplitudes sqrt(2/R) w [M, L, R/2]."""
    draw = random.Random(options.seed)
    pairs = (options.components + 1) // 2
    scale = math.sqrt(2 / options.components)
    frequencies = [[options.theta ** -draw.random() for _ in range(pairs)] for _ in range(blocks)]
    amplitudes = [
        [[scale * draw.gauss(0.0, 1.0) for _ in range(pairs)] for _ in range(options.channels)] for _ in range(blocks)
    ]
    return frequencies, amplitudes


class TensorTapeLayer(LayerEncoding):
    """Eq. 6 to 8 of the paper, literally."""

    def __init__(self, options: TensorTapeOptions, geometry: Geometry, updates: bool):
        super().__init__()
        self.options = options
        self.blocks = geometry.head_dim // options.channels
        self.carries = updates and options.attention_update
        self.mixes = updates and options.mlp_update
        heads, groups = geometry.num_heads, geometry.num_kv_heads
        mixer = options.mixer_size or 4 * groups
        sizes = {"g": groups, "m": self.blocks, "l": options.channels, "r": options.components}
        mixed = math.prod(sizes[axis] for axis in MIXINGS[options.mix_over])
        if self.carries:
            self.carry = nn.Parameter(torch.empty(groups, heads))
        if self.mixes:
            self.mix_in = nn.Parameter(torch.empty(mixer, mixed))
            self.mix_out = nn.Parameter(torch.empty(mixed, mixer))
            self.gate = nn.Linear(geometry.hidden_size, mixer, bias=False)

    def reset_parameters(self, std: float) -> None:
        scale = self.options.init_scale
        if self.carries:
            nn.init.normal_(self.carry, std=scale / math.sqrt(self.carry.shape[-1]))
        if self.mixes:
            nn.init.normal_(self.mix_in, std=1 / math.sqrt(self.mix_in.shape[-1]))
            nn.init.normal_(self.mix_out, std=scale / math.sqrt(self.mix_out.shape[-1]))

    def rotate(self, query: Tensor, key: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """q_m^T e_m and k_m^T e_m, whose products over R and M are the scores of eq. 6. D becomes M * R."""
        assert state is not None
        tensors = self._unfold(state)
        return self._contract(query, tensors), self._contract(key, tensors)

    def extra_values(self, state: Tensor | None) -> Tensor | None:
        return state if self.carries else None

    def update(
        self, state: Tensor | None, attended_state: Tensor | None, normed_hidden: Tensor, mlp_output: Tensor
    ) -> Tensor | None:
        assert state is not None
        if self.carries:
            assert attended_state is not None
            state = state + torch.einsum("gh,bhne->bgne", self.carry, attended_state)
        if self.mixes:
            psi = nn.functional.silu(self.gate(normed_hidden))
            axes = MIXINGS[self.options.mix_over]
            rest = [axis for axis in "gmlr" if axis not in axes]
            tensors = self._unfold(state.expand(normed_hidden.shape[0], -1, -1, -1))
            mixed = torch.einsum(f"bgnmlr->bn{axes}{''.join(rest)}", tensors)
            shape = mixed.shape
            mixed = mixed.flatten(2, 1 + len(axes)).flatten(3)
            # not `@`, which would launch a small product per token
            mixed = psi[..., None] * torch.einsum("jc,bnce->bnje", self.mix_in, mixed)
            mixed = torch.einsum("cj,bnje->bnce", self.mix_out, mixed)
            mixed = torch.einsum(f"bn{axes}{''.join(rest)}->bgnmlr", mixed.reshape(shape))
            state = state + mixed.flatten(3)
        return state

    def _unfold(self, state: Tensor) -> Tensor:
        return state.unflatten(-1, (self.blocks, self.options.channels, self.options.components))

    def _contract(self, x: Tensor, tensors: Tensor) -> Tensor:
        """[B, H, N, L * M] and [B or 1, G, N, M, L, R] to [B, H, N, R * M]."""
        tensors = tensors.repeat_interleave(x.shape[1] // tensors.shape[1], dim=1)
        blocks = x.unflatten(-1, (-1, self.blocks)).transpose(-1, -2)
        # not einsum, which would compute a product of 1 x L and L x R matrices per block and token
        return (blocks[..., None] * tensors).sum(-2).transpose(-1, -2).flatten(3)


@register_encoding("tensor_tape")
class TensorTape(PositionalEncoding):
    """Initially e[m] = [[cos, sin], [-sin, cos]]: the paper's transposed, to rotate in the direction of Llama's
    RoPE.
    """

    idea = "the paper's general L x R tensors, for checks and ablations"
    options_class = TensorTapeOptions
    options: TensorTapeOptions
    takes_axes = True

    def __init__(self, options: TensorTapeOptions, geometry: Geometry):
        super().__init__(options, geometry)
        # plain numbers, not a buffer: a buffer would be rounded when the model is cast to half precision
        self.fourier_features = draw_fourier_features(options, geometry.head_dim // options.channels)
        # a shift rotates pairs of components, each frequency by its own angle: mixing over components or blocks, or a
        # component without its partner, does not commute with that
        self.shift_invariant = options.mix_over in ("heads", "heads+channels") and options.components % 2 == 0

    @property
    def value_columns(self) -> list[int]:
        width = self.geometry.head_dim * self.options.components if self.options.attention_update else 0
        return [width if self._updates(index) else 0 for index in range(self.geometry.num_layers)]

    @property
    def key_columns(self) -> list[int]:
        # a rotated key has M * R numbers
        width = self.geometry.head_dim // self.options.channels * self.options.components
        return [width - self.geometry.head_dim] * self.geometry.num_layers

    def initial_state(self, positions: Positions, dtype: torch.dtype) -> Tensor:
        device = positions.ids.device
        exact = position_dtype(device)
        if self.options.init == "rope":
            frequencies = axis_frequencies(self.geometry, self.options.theta, UNSCALED, device)
            several = self.geometry.num_axes > 1
            angles = (
                angles_on_axes(positions.ids, frequencies)
                if several
                else positions.ids[..., None].to(exact) * frequencies
            )
            cos, sin = angles.cos(), angles.sin()
            tensors = torch.stack((torch.stack((cos, sin), -1), torch.stack((-sin, cos), -1)), -2)
        else:
            frequencies, amplitudes = (
                torch.tensor(drawn, device=device, dtype=exact) for drawn in self.fourier_features
            )
            angles = positions.ids[..., None, None].to(exact) * frequencies
            waves = torch.stack((angles.cos(), angles.sin()), -1).unsqueeze(-3)
            tensors = (waves * amplitudes[..., None]).flatten(-2)[..., : self.options.components]
        return tensors.flatten(2).to(dtype)[:, None].expand(-1, self.geometry.num_kv_heads, -1, -1)

    def _updates(self, index: int) -> bool:
        return index < self.geometry.num_layers - 1 or self.geometry.num_loops > 1

    def layer(self, index: int) -> LayerEncoding:
        return TensorTapeLayer(self.options, self.geometry, self._updates(index))
