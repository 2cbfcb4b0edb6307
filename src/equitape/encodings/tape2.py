"""TAPE 2: TAPE with the parts that improved it in our measurements (docs/reference/encodings/tape2.md).

The same code and options as `tape`, with other defaults: complex mixing, normalisation, and learned decay slopes in
half of the heads, inside their width. Train it with jumps (training/jumps.py) to read far beyond the trained length.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from ..settings import Gt, Le
from .base import register_encoding
from .tape import Tape, TapeOptions


@dataclass(frozen=True, kw_only=True)
class Tape2Options(TapeOptions):
    """Options of TAPE with other defaults."""

    kind: ClassVar[str] = "tape2"
    normalize: bool = True
    complex_mixing: bool = True
    decay: Literal["none", "slopes", "learned", "gate"] = "learned"
    decay_heads: Annotated[float, Gt(0), Le(1)] = 0.5
    decay_inside: bool | Literal["decaying"] = True


@register_encoding("tape2")
class Tape2(Tape):
    """TAPE with complex mixing, normalisation, and learned decay in half of the heads."""

    idea = "TAPE with complex mixing, normalisation and learned decay: our recommendation"
    options_class = Tape2Options
