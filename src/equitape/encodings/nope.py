"""NoPE: no positional encoding; order reaches the model through the causal mask (docs/reference/encodings/nope.md)."""

from .base import PositionalEncoding, register_encoding


@register_encoding("nope")
class NoPE(PositionalEncoding):
    """Every hook left as it is."""

    idea = "nothing; order comes from the causal mask"
