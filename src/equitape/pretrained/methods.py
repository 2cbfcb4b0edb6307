"""Adaptation methods: how each changes the positions, and what it trains."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..encodings import build_encoding
from ..model import EquitapeConfig, EquitapeForCausalLM
from .longlora import ShiftedSparseAttention
from .lora import add_lora
from .settings import AdaptSettings

GROUPS_OF_LONGLORA = 4
"""Number of shifted sparse attention groups per context, as in the paper."""
THETA_GROWTH = 100.0
"""Factor by which "theta" raises the rotary base: 1e4 to 1e6, as TAPE's paper did for twice the context."""


def change_config(source: EquitapeConfig, settings: AdaptSettings) -> EquitapeConfig:
    """The adapted configuration, from the source's."""
    longer = EquitapeConfig.from_dict(source.to_dict())
    if settings.context is not None:
        longer.extend(settings.context)
    given = longer.to_dict()
    given["encoding"] = change_encoding(source, settings)
    if settings.query_growth is not None:
        given["query_growth"] = settings.query_growth
        given["query_growth_start"] = source.query_growth_start or source.context
    config = EquitapeConfig.from_dict(given)
    if value_rooms(config) != value_rooms(source):
        raise ValueError(
            "carried_frequencies of TAPE make values narrower, and the source's values have another width; use the "
            "source's carried_frequencies and layers, and a method that keeps its encoding."
        )
    if settings.effects.shifted:
        shifted_attention(config, settings).check(config)
    return config


def value_rooms(config: EquitapeConfig) -> list[int]:
    """Columns of a value that make room for what attention carries, block by block."""
    assert isinstance(config.encoding, dict)
    with torch.device("meta"):
        encoding = build_encoding(config.encoding, config.geometry)
        return [encoding.layer(index).value_room for index in range(config.geometry.num_layers)]


def shifted_attention(config: EquitapeConfig, settings: AdaptSettings) -> ShiftedSparseAttention:
    """LongLoRA's attention for the context of a model configured by `change_config`."""
    context = settings.context or config.context
    return ShiftedSparseAttention(settings.group_size or max(context // GROUPS_OF_LONGLORA, 2))


def change_encoding(source: EquitapeConfig, settings: AdaptSettings) -> dict[str, Any]:
    """The adapted encoding."""
    effects = settings.effects
    assert isinstance(source.encoding, dict)
    encoding = dict(source.encoding)
    if effects.drops_positions:
        return {"kind": "nope"}
    changes = effects.tape or effects.raises_theta or settings.theta is not None or settings.scaling is not None
    if changes and encoding["kind"] not in ("rope", "tape", "tape2"):
        raise ValueError(
            f"The source uses encoding {encoding['kind']!r}; method {settings.method!r} changes rotary positions and "
            f"needs 'rope', 'tape' or 'tape2'."
        )
    if effects.tape:
        # decay, clock and rotated values stay the source's: with the defaults of tape2, outputs would change
        encoding = {**encoding, "kind": effects.tape, **settings.tape}
    if settings.theta is not None or effects.raises_theta:
        encoding["theta"] = settings.theta or encoding["theta"] * THETA_GROWTH
    if settings.scaling is not None:
        encoding["scaling"] = stretch(encoding["scaling"], source.context, settings)
    return encoding


def stretch(scaling: dict[str, Any], trained: int, settings: AdaptSettings) -> dict[str, Any]:
    """The scaling of rotary frequencies that maps the new context to the trained one."""
    if settings.context is None or settings.context <= trained:
        raise ValueError(
            f"Scaling {settings.scaling!r} extends the trained context of {trained} tokens, but "
            f"context is {settings.context}; set it above {trained}."
        )
    kind = scaling["kind"]
    if kind not in ("default", settings.scaling):
        raise ValueError(
            f"The source already scales its positions by {kind!r}, which cannot be combined with {settings.scaling!r}; "
            f"drop the scaling, or change theta."
        )
    factor = settings.scaling_factor or settings.context / trained
    if kind == "default":
        return {"kind": settings.scaling, "factor": factor, "original_max_positions": trained}
    if kind == "yarn":
        factor = settings.scaling_factor or settings.context / scaling["original_max_positions"]
        return {**scaling, "factor": factor, "attention_factor": None}
    return {**scaling, "factor": scaling["factor"] * factor}


def set_training(model: EquitapeForCausalLM, settings: AdaptSettings) -> None:
    """Add LoRA layers if the method has them, and require gradients only where the method trains."""
    effects = settings.effects
    if effects.lora:
        add_lora(model, settings)
    if effects.shifted:
        model.model.training_attention = shifted_attention(model.config, settings)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(
            effects.everything
            or (effects.tape and is_encoding(name))
            or (effects.lora and ".lora_" in name)
            or (settings.trains("embeddings") and name == "model.embed_tokens.weight")
            or (settings.trains("norms") and is_norm(name))
        )
    if effects.tape and not any(is_encoding(name) for name, _ in trained_parameters(model)):
        raise ValueError(
            "No block of this model can update TAPE's field, so there is nothing to train: the last block never does, "
            "nor do layers with an encoding of their own. Use a method without TAPE."
        )


def is_encoding(name: str) -> bool:
    """Whether a parameter belongs to the positional encoding."""
    return "encoding" in name.split(".")


def is_norm(name: str) -> bool:
    """Whether a parameter belongs to a norm: of a block, of queries and keys, or the final one."""
    return name.split(".")[-2].endswith("norm")


def trained_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that require gradients, by name; tied ones once."""
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)


@dataclass(frozen=True)
class TrainingSummary:
    """How much of a model is trainable."""

    tensors: int
    parameters: int
    total: int

    @property
    def share(self) -> float:
        """Trainable fraction of all parameters, from 0 to 1."""
        return self.parameters / self.total

    def __str__(self) -> str:
        return (
            f"{self.tensors} tensors, {self.parameters:,} of {self.total:,} parameters, {self.share:.3%} of the model"
        )


def summarize_training(model: nn.Module) -> TrainingSummary:
    """Count trainable parameters. Tied weights count once."""
    sizes = [parameter.numel() for _, parameter in trained_parameters(model)]
    return TrainingSummary(len(sizes), sum(sizes), sum(parameter.numel() for parameter in model.parameters()))
