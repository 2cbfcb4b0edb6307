"""TAPE 2: TAPE with the parts that improved it in our measurements (docs/reference/encodings/tape2.md).

The same code and options as `tape`, with other defaults: a field that moves, complex mixing, normalisation, and
learned decay slopes. Train it with jumps (training/jumps.py) to read far beyond the trained length.
"""

from dataclasses import dataclass
from typing import Literal

from .base import register_encoding
from .tape import Tape, TapeOptions


@dataclass(frozen=True, kw_only=True)
class Tape2Options(TapeOptions):
    """Options of TAPE with other defaults."""

    move: bool = True
    normalize: bool = True
    complex_mixing: bool = True
    decay: Literal["none", "slopes", "learned", "gate"] = "learned"


@register_encoding("tape2")
class Tape2(Tape):
    """TAPE with move, complex mixing, normalisation and learned decay."""

    idea = "TAPE whose field moves, with learned decay: our recommendation"
    options_class = Tape2Options
