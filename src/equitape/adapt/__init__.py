"""Adapt pretrained checkpoints. An adapted model has the same outputs until it is trained."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

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
PLACES = {
    "adapter": ("save_adapter",),
    "adapting": ("adapt", "load_adapter"),
    "lora": ("merge_lora",),
    "methods": ("summarize_training",),
    "settings": ("METHODS", "AdaptSettings", "Adaptation"),
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that commands start quickly."""
    for module, names in PLACES.items():
        if name in names:
            return getattr(import_module(f"equitape.pretrained.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
