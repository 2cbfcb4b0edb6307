"""Attention with positional encodings as plain modules, for any model (docs/how-to/own-model.md)."""

from ..encodings.positions import Positions
from .attention import Attention, RotaryAttention, TapeAttention
from .core import split, widen
from .ids import grid_ids, join_ids, locate, token_ids
from .layer import PositionalLayer, make_encoding
from .protocol import Measurable

__all__ = [
    "Attention",
    "Measurable",
    "PositionalLayer",
    "Positions",
    "RotaryAttention",
    "TapeAttention",
    "grid_ids",
    "join_ids",
    "locate",
    "make_encoding",
    "split",
    "token_ids",
    "widen",
]
