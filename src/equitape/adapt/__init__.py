"""Adapt pretrained checkpoints. An adapted model has the same outputs until it is trained."""

from typing import TYPE_CHECKING

from ..lazy import lazy_names

if TYPE_CHECKING:
    from ..pretrained.adapter import save_adapter
    from ..pretrained.adapting import adapt, load_adapter
    from ..pretrained.lora import merge_lora
    from ..pretrained.methods import summarize_training
    from ..pretrained.settings import METHODS, Adaptation, AdaptSettings

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

__getattr__ = lazy_names(
    __name__,
    {
        "METHODS": "equitape.pretrained.settings",
        "AdaptSettings": "equitape.pretrained.settings",
        "Adaptation": "equitape.pretrained.settings",
        "adapt": "equitape.pretrained.adapting",
        "load_adapter": "equitape.pretrained.adapting",
        "merge_lora": "equitape.pretrained.lora",
        "save_adapter": "equitape.pretrained.adapter",
        "summarize_training": "equitape.pretrained.methods",
    },
)
