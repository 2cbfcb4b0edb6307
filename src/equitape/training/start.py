"""Training that starts from a checkpoint instead of new weights."""

from pathlib import Path
from typing import Any

from ..model import EquitapeConfig, EquitapeForCausalLM
from ..pretrained.families import translate_config
from ..pretrained.loading import is_adapter, load_model
from ..runs.folders import model_folder


def start_config(start: str, trained: int, tested: int) -> EquitapeConfig:
    """The configuration of a checkpoint as an `EquitapeConfig`, for the lengths it will be trained and tested at."""
    from transformers import AutoConfig

    folder = model_folder(start)
    if is_adapter(start):
        raise ValueError(
            f"{start!r} holds an adapter; save it as a whole model first, with equitape adapt BASE --adapter {start} "
            f"--out FOLDER."
        )
    if not (Path(folder).expanduser() / "config.json").is_file():
        raise ValueError(f"There is no checkpoint to start from at {start!r}; give the folder of a saved model or run.")
    config = translate_config(AutoConfig.from_pretrained(folder))
    config.extend(trained, room=tested)
    return config


def start_model(start: str, config: EquitapeConfig) -> EquitapeForCausalLM:
    """The checkpoint in float32, with every weight trained."""
    model: Any = load_model(start, "float32")
    model.config.max_position_embeddings = config.max_position_embeddings
    model.config.trained_length = config.trained_length
    return model.requires_grad_(True)
