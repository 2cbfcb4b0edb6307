"""Pretrained checkpoints in, adapted models out: the same outputs until trained."""

from ..pretrained.adaptation import Adaptation
from ..pretrained.adapter import save_adapter
from ..pretrained.adapting import adapt, load_adapter
from ..pretrained.lora import merge_lora
from ..pretrained.methods import METHODS, AdaptSettings, summarize_training

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
