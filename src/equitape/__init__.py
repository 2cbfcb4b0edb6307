"""equitape: positional encodings that adapt to content, and everything they are compared with."""

from .adapt import adapt, load_adapter
from .encodings import available_encodings, register_encoding
from .model import (
    EquitapeConfig,
    EquitapeForCausalLM,
    EquitapeForQuestionAnswering,
    EquitapeForSequenceClassification,
    EquitapeForTokenClassification,
    EquitapeModel,
)
from .version import __version__

__all__ = [
    "EquitapeConfig",
    "EquitapeForCausalLM",
    "EquitapeForQuestionAnswering",
    "EquitapeForSequenceClassification",
    "EquitapeForTokenClassification",
    "EquitapeModel",
    "__version__",
    "adapt",
    "available_encodings",
    "load_adapter",
    "register_encoding",
]
