"""Write an adapted model in its base's own architecture, for programs that do not know equitape.

Only what that architecture has can be written: merged weights, another rotary base, scaled positions.
"""

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel

from ..encodings.rope import RoPEOptions
from ..model import EquitapeConfig
from ..runs.files import files_in
from .adapting import AdaptedForCausalLM, save_tokenizer
from .card import CARD, native_card
from .families import join_fused, translate_config, write_rope
from .lora import merged_state
from .settings import adaptation_of
from .weights import Base, load_source


def check_native(source: Any, config: EquitapeConfig) -> None:
    """Raise ValueError if the base's architecture cannot compute what an adapted configuration asks for.

    source: the base's configuration, one of transformers.
    """
    if source.model_type == EquitapeConfig.model_type:
        raise ValueError("The base is a model of this package, so there is no other architecture to write it in.")
    base = translate_config(source)
    assert isinstance(config.encoding, dict)
    kind, growth = config.encoding["kind"], config.query_growth
    if kind != "rope":
        raise ValueError(
            f"The base's own architecture has no {kind!r}, so it cannot hold this model; save it as a model of this "
            f"package, or use a method that only trains weights and changes theta."
        )
    plain = {**RoPEOptions().to_dict(), "theta": config.encoding["theta"], "scaling": config.encoding["scaling"]}
    parts = [name for name, value in plain.items() if config.encoding[name] != value]
    if parts:
        raise ValueError(
            f"The base's own architecture has no {' and no '.join(parts)}, so it cannot hold this model; save it as a "
            f"model of this package."
        )
    if growth != base.query_growth:
        raise ValueError(
            f"The base's own architecture cannot let queries grow with the tokens read (query_growth {growth:g}); set "
            f"query_growth to {base.query_growth:g}, or save a model of this package."
        )
    longer = config.max_position_embeddings != base.max_position_embeddings
    if config.encoding["scaling"]["kind"] == "dynamic" and longer:
        raise ValueError(
            "The base scales positions by 'dynamic', which begins at its own context; a longer one cannot be written "
            "in its architecture. Save a model of this package."
        )
    target = copy.deepcopy(source)
    write_positions(target, config)
    try:
        type(target).from_dict(target.to_dict())
    except Exception as error:
        # each family checks its own positions, and with errors of its own
        reason = " ".join(str(error).split())
        raise ValueError(
            f"The base's own architecture does not take these positions ({reason}); save a model of this package."
        ) from error


def save_native(base: Base, model: AdaptedForCausalLM, tokenizer: Any, folder: str | Path) -> None:
    """Write the model with all weights, its card and its tokenizer, if any; transformers alone loads it.

    base: what the model was adapted from. It is not changed.
    """
    source = load_source(base, model.dtype)
    check_native(source.config, model.config)
    if source is base:
        source = copy.deepcopy(source)
    place_weights(source, model)
    write_positions(source.config, model.config)
    with files_in(folder) as aside:
        source.save_pretrained(aside)
        (aside / CARD).write_text(native_card(model, adaptation_of(model), type(source).__name__))
    save_tokenizer(tokenizer, model.config, Path(folder))


def architecture_in(folder: Path) -> str:
    """The name of the model class of a saved model."""
    return str(AutoConfig.from_pretrained(folder).architectures[0])


@torch.no_grad()
def place_weights(source: PreTrainedModel, model: AdaptedForCausalLM) -> None:
    """Copy the weights of an adapted model, LoRA merged, to a model of its base's class."""
    parameters = dict(source.named_parameters(remove_duplicate=False))
    weights = join_fused(merged_state(model), parameters)
    for name, parameter in parameters.items():
        # a new tensor: the adapted model may share the memory of the old one
        parameter.data = weights[name].to(parameter.device, parameter.dtype, copy=True)
    source.tie_weights()


def write_positions(target: Any, config: EquitapeConfig) -> None:
    """Put context and rotary positions of an adapted configuration into one of transformers."""
    assert isinstance(config.encoding, dict)
    target.max_position_embeddings = config.max_position_embeddings
    if getattr(target, "head_dim", 0) is None:
        # YaRN reads it
        target.head_dim = config.head_dim
    rope, old = write_rope(config.encoding), dict(target.rope_parameters)
    # layers with a window keep their own, where types of layers have different ones
    typed = any(isinstance(value, dict) for value in old.values())
    if "partial_rotary_factor" in old:
        rope["partial_rotary_factor"] = old["partial_rotary_factor"]
    target.rope_parameters = {**old, "full_attention": rope} if typed else rope
