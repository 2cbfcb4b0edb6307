"""The options of an encoding, and the sizes of the model they must fit."""

from dataclasses import dataclass

from ..settings import Settings


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """The sizes of the model an encoding lives in."""

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
    """Base of every encoding's options. Subclasses check themselves in `__post_init__` and `check`."""

    def check(self, geometry: Geometry) -> None:
        """Refuse what does not fit the model, naming the value, the limit and the remedy."""
