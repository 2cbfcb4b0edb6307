"""adapt: from a pretrained model to one of ours with the same outputs, ready to train."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..model import EquitapeForCausalLM
from .families import translate_config
from .methods import AdaptSettings, change_config, set_training, trained_parameters
from .weights import Base, convert, fingerprint, load_source


@dataclass(kw_only=True)
class Adaptation:
    """What `adapt` did. The model keeps it, and it is written beside the weights."""

    settings: AdaptSettings
    base_name: str
    base: dict[str, Any]
    """The base's fingerprint."""
    trained: tuple[str, ...]
    """Names of the parameters the method trains."""
    training: dict[str, Any] = field(default_factory=dict)
    """Data, settings and results of a fine-tuning run."""


def adapt(
    base: Base, method: str = "tape", *, dtype: str | torch.dtype = "auto", **options: Any
) -> EquitapeForCausalLM:
    """A pretrained model as an EquitapeForCausalLM, prepared for training by a method.

    base: a folder with safetensors, a GGUF file, or a loaded transformers model of the families Llama, Mistral, Qwen2
        or Qwen3. A loaded model's tensors are shared, not copied: training that changes them changes it too.
    method: tape, lora, tape+lora, longlora, theta, theta+lora or full.
    dtype: of weights read from a path; "auto" keeps the file's (GGUF: float32).
    options: as in `AdaptSettings`: context, scaling, theta, train_embeddings, lora_rank, ...

    Outputs are the original's until something is trained, unless scaling or theta change the positions. The model is
    in evaluation mode, and only what the method trains takes gradients.
    """
    return build(base, AdaptSettings.parse({"method": method, **options}, "adapt"), dtype)


def build(base: Base, settings: AdaptSettings, dtype: str | torch.dtype = "auto") -> EquitapeForCausalLM:
    """`adapt` with its settings already made."""
    source = load_source(base, dtype, check=lambda config: change_config(config, settings))
    config = translate_config(source.config)
    model = convert(source, change_config(config, settings), settings.seed)
    set_training(model, settings)
    model.adaptation = Adaptation(
        settings=settings,
        base_name=name_of(base),
        base=fingerprint(source, config),
        trained=tuple(name for name, _ in trained_parameters(model)),
    )
    return model


def name_of(base: Base) -> str:
    """What to call a base: the last part of its path."""
    given = base.config._name_or_path if isinstance(base, PreTrainedModel) else base
    name = Path(str(given)).expanduser().resolve().name if str(given) else ""
    return name or (base.config.model_type if isinstance(base, PreTrainedModel) else str(base))
