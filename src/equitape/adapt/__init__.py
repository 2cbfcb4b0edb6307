"""Pretrained checkpoints in, adapted models out: the same outputs until trained."""

from .adapter import load_adapter, save_adapter
from .adapting import Adaptation, adapt
from .lora import merge_lora
from .methods import METHODS, AdaptSettings, summarize_training

__all__ = [
    "METHODS",
    "AdaptSettings",
    "Adaptation",
    "adapt",
    "load_adapter",
    "merge_lora",
    "save_adapter",
    "summarize_training",
]
