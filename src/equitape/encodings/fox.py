"""FoX, the Forgetting Transformer: a forget gate that reads the content, no ids (docs/reference/encodings/fox.md).

The decay "gate" of decay.py and nothing else; `{"kind": "rope", "decay": "gate"}` is FoX with RoPE.
"""

from dataclasses import dataclass
from typing import Literal

from .base import register_encoding
from .nope import NoPE, NoPEOptions


@dataclass(frozen=True, kw_only=True)
class FoXOptions(NoPEOptions):
    """Options of FoX."""

    decay: Literal["gate"] = "gate"


@register_encoding("fox")
class FoX(NoPE):
    """NoPE whose scores decay by a forget gate."""

    idea = "scores decay by a forget gate that reads the content"
    options_class = FoXOptions
