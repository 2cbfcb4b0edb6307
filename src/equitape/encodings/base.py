"""The interface of a positional encoding. The base hooks do nothing: that is NoPE.

An encoding is two modules. `PositionalEncoding` belongs to the model: it maps ids, adds to the embeddings, and makes
the initial positional state. `LayerEncoding` belongs to a block: it rotates queries and keys by the state, biases
scores, and updates the state. The state is one tensor, passed from block to block as argument and result.

Shapes: B batch, N tokens, K keys, H query heads, G key-value heads, D head dimension, C hidden size.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..registry import Registry
from .heads import Columns
from .options import Geometry, Options
from .positions import Positions

ENCODINGS: Registry[type["PositionalEncoding"]] = Registry("encoding")

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""FlexAttention's form of a bias: (score, batch, head, query index, key index) -> score."""


RENAMED_HOOKS = {"begin": "initial_state", "values": "extra_values", "add_columns": "columns"}
"""Earlier hooks: an encoding that still defines one gets an error instead of being ignored."""

INITIALIZER_RANGE = 0.02
"""Standard deviation of initial weights outside a model, as a configuration's default."""


class InitialisedType(type):
    """Metaclass of modules that initialise their parameters at the end of construction."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        module = super().__call__(*args, **kwargs)
        with separate_random_stream(module):
            module.reset_parameters(INITIALIZER_RANGE)
        return module


@contextmanager
def separate_random_stream(module: nn.Module) -> Iterator[None]:
    """Draw random numbers for a module's parameters without advancing the global random streams.

    A model initialises its encodings again from its own stream, so a seed gives the same weights with and without this.
    """
    device = next((parameter.device for parameter in module.parameters(recurse=False)), torch.device("meta"))
    if device.type == "meta":
        # nothing to draw
        yield
        return
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        # not the numbers that later constructions will draw
        torch.default_generator.manual_seed(int(torch.randint(2**62, (), device="cpu")))
        yield


class HookedModule(nn.Module, metaclass=InitialisedType):
    """A module with several entry points: `module("hook", ...)` runs `module.hook(...)`.

    The model calls every hook through `forward`, since wrappers such as accelerate's offloading hook into it to load a
    module's parameters.
    """

    def forward(self, hook: str, *inputs: Any) -> Any:
        """Run a hook."""
        return getattr(self, hook)(*inputs)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for old, new in RENAMED_HOOKS.items():
            if old in vars(cls):
                raise TypeError(f"{cls.__name__} defines the hook {old!r}, which was renamed to {new!r}; rename it.")

    def reset_parameters(self, std: float) -> None:
        """Initialise bare parameters. Called at construction, and again by the model with its initializer_range.

        Submodules such as nn.Linear initialise themselves, and the model initialises them again.
        """


class SmallLinear(nn.Module):
    """A linear layer with few inputs, under its own class: quantization and adapters replace every nn.Linear."""

    def __init__(self, num_inputs: int, num_outputs: int):
        super().__init__()
        drawn = nn.Linear(num_inputs, num_outputs)
        self.weight, self.bias = drawn.weight, drawn.bias

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., num_inputs] to [..., num_outputs]."""
        return nn.functional.linear(x, self.weight, self.bias)


class LayerEncoding(HookedModule):
    """The part of an encoding inside one block."""

    keeps_sums: bool = False
    """Whether cached keys of this block hold running sums, from which a cached sequence continues."""
    value_room: int = 0
    """Columns by which the block's own value is narrower than a head, to make room for those of `extra_values`."""
    value_heads: int = 0
    """Number of key-value heads, from the first on, whose values are rotated by the state like keys and whose outputs
    are rotated back (values.py)."""
    bias_copies: float = 4.0
    """Memory that it takes to make `bias` and to train through it, in times of the bias itself."""
    kernel_options: ClassVar[dict[str, Any] | None] = None
    """Options of FlexAttention's kernel that computes `score_mod`; None for torch's own."""
    scalars: tuple[str, ...] = ()
    """Parameters of shape [1] that files of version 0.1 hold as scalars, which cannot be sharded."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name in self.scalars:
            if f"{prefix}{name}" in state_dict:
                state_dict[f"{prefix}{name}"] = state_dict[f"{prefix}{name}"].reshape(1)
        super()._load_from_state_dict(state_dict, prefix, *args)

    @property
    def updates_state(self) -> bool:
        """Whether `update` changes the state; nothing needs to call it otherwise."""
        return type(self).update is not LayerEncoding.update

    def rotate(self, query: Tensor, key: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Apply positions to query [B, H, N, D] and key [B, G, N, D]; the returned key is cached."""
        return query, key

    def columns(
        self, hidden: Tensor, positions: Positions, last_key: Tensor | None, dtype: torch.dtype, scale: float
    ) -> Columns | None:
        """Columns of queries and keys, in `dtype`, whose products are added to the scores, or None.

        hidden: [B, N, C], input of the query and key projections; last_key: [B, G, D + E], the last cached key, for
        encodings with `keeps_sums`; scale: the softmax scale.
        """
        return None

    def rotate_with_columns(
        self, query: Tensor, key: Tensor, state: Tensor | None, columns: Columns
    ) -> tuple[Tensor, Tensor]:
        """`rotate`, then put the columns in. Called if there are any; the returned key is cached."""
        return columns.put(*self.rotate(query, key, state))

    def extra_values(self, state: Tensor | None) -> Tensor | None:
        """Columns [B, G, N, E] appended to the value in attention, or None."""
        return None

    def bias(
        self, query: Tensor, key: Tensor, state: Tensor | None, positions: Positions, key_ids: Tensor,
        visible: Tensor, scale: float,
    ) -> Tensor | None:  # fmt: skip
        """A term added to the scaled scores: [B or 1, H, N, K], or None.

        key: [B, G, K, D] including cached ones; key_ids: [B, K]; visible: [B, 1, N, K] bool; scale: the softmax scale.
        Keys must be last in memory (stride 1): where the bias is computed again for the backward pass, torch.compile
        keeps its order, and fused kernels on CUDA refuse any other.
        """
        return None

    def score_mod(self, state: Tensor | None, positions: Positions, key_ids: Tensor) -> ScoreMod | None:
        """The bias for FlexAttention, for encodings that list it among their backends."""
        return None

    def update(
        self, state: Tensor | None, attended_state: Tensor | None, normed_hidden: Tensor, mlp_output: Tensor
    ) -> Tensor | None:
        """The state of the next block. It must not assume causal attention.

        attended_state: [B, H, N, E], the attention average of `extra_values`; normed_hidden: [B, N, C], the normalised
        hidden states after attention, input of the feed-forward layer; mlp_output: [B, N, C], its output.
        """
        return state


class PositionalEncoding(HookedModule):
    """The part of an encoding for the full model. Subclasses are registered under the name users give as `kind`."""

    kind: ClassVar[str]
    idea: ClassVar[str] = ""
    """Short description for lists."""
    options_class: ClassVar[type[Options]] = Options
    backends: ClassVar[tuple[str, ...]] = ("eager", "sdpa", "flex_attention")
    """Supported attention implementations."""
    adds_bias: ClassVar[bool] = False
    """Whether layers override `bias`; then the mask is always materialised and key ids are computed. With
    "flex_attention" among the backends they override `score_mod` too.
    """
    shift_invariant: bool = True
    """Whether adding one number to all ids leaves the outputs unchanged."""
    reads_ids: bool = True
    """Whether the encoding depends on position ids."""
    bounded_ids: bool = False
    """Whether there is a fixed number of positions, such as rows of a table."""
    needs_even_head_dim: ClassVar[bool] = False
    needs_extent: bool = False
    """Whether `initial_state` reads `positions.origin` or `positions.span`."""
    keeps_sums: bool = False
    """Whether a cached sequence continues from running sums in columns of cached keys."""
    keeps_numbers: bool = False
    """Whether cached keys hold positions or running sums, which must not be rounded."""
    takes_axes: ClassVar[bool] = False
    """Whether ids may have several axes (Geometry.num_axes)."""
    needs_causal: bool = False
    """Whether scores make sense only if tokens attend to earlier ones."""
    has_field: ClassVar[bool] = False
    """Whether the state holds a field of phasors [B, G, N, D] that users may inspect; see `field`."""

    def __init__(self, options: Options, geometry: Geometry):
        super().__init__()
        self.options = options
        self.geometry = geometry

    @classmethod
    def check(cls, options: Any, geometry: Geometry) -> None:
        """Raise ValueError for options that do not fit the model."""
        if cls.needs_even_head_dim and geometry.head_dim % 2:
            raise ValueError(
                f"Encoding {cls.kind!r} rotates pairs of channels, so head_dim must be even; it is {geometry.head_dim}."
            )
        if geometry.num_axes > 1 and not cls.takes_axes:
            able = ", ".join(repr(kind) for kind in ENCODINGS if ENCODINGS[kind].takes_axes)
            raise ValueError(
                f"Encoding {cls.kind!r} takes ids of one axis, not {geometry.num_axes}; use one of {able}."
            )
        options.check(geometry)

    def check_lengths(self, trained: int, tested: int) -> None:
        """Raise ValueError if rows of this many tokens are not supported; most encodings support any number."""

    @property
    def cache_refusal(self) -> str | None:
        """Why a key-value cache cannot be used, or None."""
        return None

    @property
    def causal(self) -> bool:
        """Whether later tokens leave the outputs of earlier ones unchanged."""
        return True

    @property
    def score_scale(self) -> float:
        """A factor on the softmax scale 1 / sqrt(D)."""
        return 1.0

    @property
    def value_columns(self) -> list[int]:
        """Number of columns that each block adds to the cached value."""
        return [0] * self.geometry.num_layers

    @property
    def carried_columns(self) -> list[int]:
        """Number of columns of the state that attention averages in each block, added or in place of the value's."""
        return self.value_columns

    @property
    def key_columns(self) -> list[int]:
        """Number of columns that each block adds to queries and keys; negative where it makes them narrower."""
        return [0] * self.geometry.num_layers

    def map_ids(self, positions: Positions, embeddings: Tensor, last_key: Tensor | None) -> Positions:
        """Replace ids before they are used (once per forward, outside checkpointed code).

        embeddings: [B, N, C], of the tokens only; last_key: [B, G, D + E], the last cached key of the first block, for
        encodings with `keeps_sums`.
        """
        return positions

    def embed(self, x: Tensor, positions: Positions) -> Tensor:
        """Add to the token embeddings [B, N, C]."""
        return x

    def initial_state(self, positions: Positions, dtype: torch.dtype) -> Tensor | None:
        """The initial state of the first block, in the model's dtype."""
        return None

    @property
    def state_width(self) -> int | None:
        """Channels of a state [B, 1, N, E] that holds its field in another layout; None for [B, G or 1, N, D]."""
        return None

    def field(self, state: Tensor) -> Tensor:
        """The field of phasors [B, G or 1, N, D] that a state holds, for encodings with `has_field`."""
        return state

    def state_of(self, field: Tensor) -> Tensor:
        """The state that holds a field: the inverse of `field`."""
        return field

    def layer(self, index: int) -> LayerEncoding:
        """The part for block `index`."""
        return LayerEncoding()

    def extra_repr(self) -> str:
        given = ", ".join(f"{key}={value!r}" for key, value in self.options.to_dict().items())
        return f"kind={self.kind!r}{', ' + given if given else ''}"


def register_encoding(kind: str) -> Callable[[type[PositionalEncoding]], type[PositionalEncoding]]:
    """Class decorator: register an encoding under `kind`."""

    def add(cls: type[PositionalEncoding]) -> type[PositionalEncoding]:
        cls.kind = kind
        ENCODINGS.register(kind, cls)
        return cls

    return add


def parse_encoding(given: str | dict[str, Any] | None, geometry: Geometry) -> dict[str, Any]:
    """Check a user's encoding against the model and fill in all defaults."""
    if given is None:
        given = {"kind": "rope"}
    if isinstance(given, str):
        given = {"kind": given}
    if not isinstance(given, dict) or "kind" not in given:
        raise ValueError(f"Encoding {given!r} has no kind; write for example {{'kind': 'tape'}}.")
    chosen = dict(given)
    cls = ENCODINGS[chosen.pop("kind")]
    options = cls.options_class.parse(chosen, f"Encoding {cls.kind!r}")
    cls.check(options, geometry)
    return {"kind": cls.kind, **options.to_dict()}


def build_encoding(chosen: dict[str, Any], geometry: Geometry) -> PositionalEncoding:
    """Build the encoding of a configuration."""
    spelled = parse_encoding(chosen, geometry)
    cls = ENCODINGS[spelled.pop("kind")]
    return cls(cls.options_class.parse(spelled, f"Encoding {cls.kind!r}"), geometry)
