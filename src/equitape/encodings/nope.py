"""NoPE: no positional encoding; order reaches the model through the causal mask (docs/reference/encodings/nope.md)."""

from dataclasses import dataclass
from typing import ClassVar

from .base import LayerEncoding, register_encoding
from .columns import ColumnsEncoding, ColumnsLayer
from .decay import DecayOptions
from .options import Geometry


@dataclass(frozen=True, kw_only=True)
class NoPEOptions(DecayOptions):
    """Options of NoPE. With a decay, it is ALiBi, learned ALiBi or the Forgetting Transformer."""

    def check(self, geometry: Geometry) -> None:
        self.check_decay("nope", geometry)


@register_encoding("nope")
class NoPE(ColumnsEncoding):
    """No hooks, except for an optional decay."""

    idea = "nothing; order comes from the causal mask"
    options_class: ClassVar[type[NoPEOptions]] = NoPEOptions

    def __init__(self, options: NoPEOptions, geometry: Geometry):
        super().__init__(options, geometry, options)
        self.reads_ids = options.decay in ("slopes", "learned")

    def layer(self, index: int) -> LayerEncoding:
        return ColumnsLayer(self.decay, self.geometry)
