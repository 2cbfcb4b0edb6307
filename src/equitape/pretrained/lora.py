"""LoRA through peft: add layers, merge weights. peft is imported on use, since that is slow."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from .settings import AdaptSettings

ADAPTER = "default"
"""peft's name of a model's only adapter."""


def add_lora(model: nn.Module, settings: "AdaptSettings") -> None:
    """Wrap the chosen linear layers with peft's in place; the model keeps its class."""
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha,
        lora_dropout=settings.lora_dropout,
        target_modules=list(settings.lora_targets),
    )
    with torch.random.fork_rng():
        torch.manual_seed(settings.seed)
        inject_adapter_in_model(config, model, ADAPTER)


def lora_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The layers wrapped by peft, by name."""
    from peft.tuners.lora import LoraLayer

    return ((name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer))


@torch.no_grad()
def merged_weight(layer: Any) -> Tensor:
    """W + B A scaled, summed in float32 and rounded once."""
    weight = layer.get_base_layer().weight
    wide = torch.promote_types(weight.dtype, torch.float32)
    return (weight.to(wide) + layer.get_delta_weight(ADAPTER).to(wide)).to(weight.dtype)


def merge_lora(model: nn.Module) -> int:
    """Merge LoRA's updates into the weights and remove its layers. Returns the number of merged layers.

    The merged weights are new tensors, so a base that shares its tensors with the model is unchanged.
    """
    layers = list(lora_layers(model))
    for name, layer in layers:
        plain = layer.get_base_layer()
        plain.weight = nn.Parameter(merged_weight(layer), requires_grad=plain.weight.requires_grad)
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, plain)
    return len(layers)


def merged_state(model: nn.Module) -> dict[str, Tensor]:
    """The state dict after `merge_lora`, without changing the model."""
    state = dict(model.state_dict())
    for name, layer in lora_layers(model):
        prefix = f"{name}."
        own = [key for key in state if key.startswith(prefix)]
        bias = state.get(f"{prefix}base_layer.bias")
        for key in own:
            del state[key]
        state[f"{prefix}weight"] = merged_weight(layer)
        if bias is not None:
            state[f"{prefix}bias"] = bias
    return state
