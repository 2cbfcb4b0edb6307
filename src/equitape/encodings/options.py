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


@dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """Base class of encoding options. Subclasses check themselves in `__post_init__` and `check`."""

    def check(self, geometry: Geometry) -> None:
        """Raise ValueError for options that do not fit the model, with the value, the limit and the remedy."""
