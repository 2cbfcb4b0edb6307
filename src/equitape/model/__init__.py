"""One Hugging Face decoder for all encodings; importing it registers the Auto classes."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from .configuration import EquitapeConfig
from .modeling import (
    EquitapeForCausalLM,
    EquitapeForQuestionAnswering,
    EquitapeForSequenceClassification,
    EquitapeForTokenClassification,
    EquitapeModel,
)

AutoConfig.register(EquitapeConfig.model_type, EquitapeConfig, exist_ok=True)
AutoModel.register(EquitapeConfig, EquitapeModel, exist_ok=True)
AutoModelForCausalLM.register(EquitapeConfig, EquitapeForCausalLM, exist_ok=True)
AutoModelForQuestionAnswering.register(EquitapeConfig, EquitapeForQuestionAnswering, exist_ok=True)
AutoModelForSequenceClassification.register(EquitapeConfig, EquitapeForSequenceClassification, exist_ok=True)
AutoModelForTokenClassification.register(EquitapeConfig, EquitapeForTokenClassification, exist_ok=True)

__all__ = [
    "EquitapeConfig",
    "EquitapeForCausalLM",
    "EquitapeForQuestionAnswering",
    "EquitapeForSequenceClassification",
    "EquitapeForTokenClassification",
    "EquitapeModel",
]
