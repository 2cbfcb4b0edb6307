"""Model files of version 0.1, whose scalar weights have one axis now."""

from typing import Any

import torch
from torch import nn
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightConverter

from ..encodings import LayerEncoding
from .configuration import EquitapeConfig


class AtLeastOneAxis(ConversionOps):
    """Reads a scalar as a tensor of shape [1]."""

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Any]:
        """input_dict: the tensor, or a list with it, by its pattern."""
        (found,) = input_dict.values()
        return {target_patterns[0]: torch.atleast_1d(found[0] if isinstance(found, list) else found)}

    @property
    def reverse_op(self) -> ConversionOps:
        """Saving changes nothing."""
        return self


def accept_scalars(layers: nn.Module) -> None:
    """Let transformers load files of version 0.1 that hold some weights of these layers as scalars."""
    names = {name for layer in layers.modules() if isinstance(layer, LayerEncoding) for name in layer.scalars}
    if names:
        mapping: list[Any] = [
            WeightConverter(f"encoding.{name}", f"encoding.{name}", [AtLeastOneAxis()]) for name in sorted(names)
        ]
        register_checkpoint_conversion_mapping(EquitapeConfig.model_type, mapping, overwrite=True)
