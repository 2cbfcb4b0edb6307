"""What `adapt` did to a model: kept by the model and written next to its weights."""

from dataclasses import dataclass, field
from typing import Any

from .settings import AdaptSettings


@dataclass(kw_only=True)
class Adaptation:
    """How a model was adapted, and from which base."""

    settings: AdaptSettings
    base_name: str
    base: dict[str, Any]
    """The base's fingerprint."""
    trained: tuple[str, ...]
    """Names of the parameters the method trains."""
    training: dict[str, Any] = field(default_factory=dict)
    """Data, settings and results of a fine-tuning run."""


def adaptation_of(model: Any) -> Adaptation:
    """The adaptation of a model that `adapt` made; an error for any other."""
    adaptation = getattr(model, "adaptation", None)
    if adaptation is None:
        raise ValueError("This model was not made by equitape.adapt, so it has no adapter; use model.save_pretrained.")
    return adaptation
