"""equitape: positional encodings that adapt to content, and everything they are compared with."""

from .encodings import available_encodings, register_encoding
from .model import (
    EquitapeConfig,
    EquitapeForCausalLM,
    EquitapeForSequenceClassification,
    EquitapeForTokenClassification,
    EquitapeModel,
)

__version__ = "0.1.0"

__all__ = [
    "EquitapeConfig",
    "EquitapeForCausalLM",
    "EquitapeForSequenceClassification",
    "EquitapeForTokenClassification",
    "EquitapeModel",
    "available_encodings",
    "register_encoding",
]
