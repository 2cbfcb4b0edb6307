"""Positional encodings, one file each; importing this package registers all of them."""

from . import (  # noqa: F401
    alibi,
    cope,
    fire,
    fox,
    learned,
    nope,
    path,
    randpe,
    rope,
    sinusoidal,
    t5,
    tape,
    tape2,
    tensor_tape,
    xpos,
)
from .base import ENCODINGS, LayerEncoding, PositionalEncoding, build_encoding, parse_encoding, register_encoding
from .options import Geometry, Options
from .positions import Positions

__all__ = [
    "ENCODINGS",
    "Geometry",
    "LayerEncoding",
    "Options",
    "PositionalEncoding",
    "Positions",
    "available_encodings",
    "build_encoding",
    "parse_encoding",
    "register_encoding",
]


def available_encodings() -> list[str]:
    """The kinds that `EquitapeConfig(encoding={"kind": ...})` accepts."""
    return list(ENCODINGS)
