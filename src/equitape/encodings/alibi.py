"""ALiBi: a penalty linear in distance, one slope per head (docs/reference/encodings/alibi.md)."""

from .base import LayerEncoding, register_encoding
from .columns import ColumnsEncoding, ColumnsLayer
from .decay import DecayOptions
from .options import Geometry, Options


@register_encoding("alibi")
class ALiBi(ColumnsEncoding):
    """score_ij - slope_h (p_i - p_j): the decay "slopes", and nothing else."""

    idea = "a penalty linear in distance, a fixed slope for each head"

    def __init__(self, options: Options, geometry: Geometry):
        super().__init__(options, geometry, DecayOptions(decay="slopes"))

    def layer(self, index: int) -> LayerEncoding:
        return ColumnsLayer(self.decay, self.geometry)
