"""ALiBi: a penalty linear in distance, one slope per head (docs/reference/encodings/alibi.md)."""

from .base import LayerEncoding, register_encoding
from .columns import ColumnsEncoding, ColumnsLayer
from .decay import DecayOptions
from .options import Geometry, Options


@register_encoding("alibi")
class ALiBi(ColumnsEncoding):
    """score_ij - slope_h (p_i - p_j): NoPE with the decay "slopes"."""

    idea = "a penalty linear in distance, with a fixed slope per head"

    def __init__(self, options: Options, geometry: Geometry):
        super().__init__(options, geometry, DecayOptions(decay="slopes"))

    def layer(self, index: int) -> LayerEncoding:
        return ColumnsLayer(self.decay, self.geometry)
