"""Mixtures of experts: transformers' own modules in place of the feed-forward layer."""

from typing import Any

from torch import nn

from .configuration import EquitapeConfig

FAMILIES = ("qwen3_moe", "mixtral")
"""Families whose modules can be used."""


def make_experts(config: EquitapeConfig, layer: int) -> nn.Module | None:
    """The experts of a layer, or None if it has none."""
    if config.experts is None or layer not in config.experts["layers"]:
        return None
    given = {name: value for name, value in config.experts.items() if name not in ("family", "layers")}
    common: dict[str, Any] = {"hidden_size": config.hidden_size, "hidden_act": config.hidden_act}
    # the modules take seconds to import
    if config.experts["family"] == "mixtral":
        from transformers import MixtralConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

        return MixtralSparseMoeBlock(_plain(MixtralConfig(**common, **given)))
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    return Qwen3MoeSparseMoeBlock(_plain(Qwen3MoeConfig(**common, **given)))


def is_part_of_experts(module: nn.Module) -> bool:
    """Whether a module comes from a mixture of experts, and its weights are therefore not those of known layers."""
    return type(module).__module__.startswith(tuple(f"transformers.models.{family}." for family in FAMILIES))


def _plain(config: Any) -> Any:
    """The configuration of a module that is not inside its own model, whose loop over experts is then the default."""
    config._experts_implementation = "eager"
    return config
