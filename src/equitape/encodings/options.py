"""Base classes of encoding options, and the model sizes they must fit."""

from dataclasses import dataclass

from ..settings import Settings


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Sizes of the model that contains an encoding."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_layers: int
    """Distinct blocks; a looped model applies each of them `num_loops` times."""
    num_loops: int = 1
    max_positions: int = 2048
    num_axes: int = 1
    """Numbers in a position id: 1 for text, 2 for images (row, column), 3 for video (time, row, column)."""
    mixed_axes: bool = False
    """With several axes: whether every frequency turns with a direction across all axes, instead of with one axis."""


@dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """Base class of encoding options. Subclasses check themselves in `__post_init__` and `check`."""

    def check(self, geometry: Geometry) -> None:
        """Raise ValueError for options that do not fit the model, with the value, the limit and the remedy."""
