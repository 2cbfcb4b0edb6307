"""Load a model and its tokenizer from a path: saved models, runs, adapters, GGUF files, or other causal models."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel

from ..data.tokenizers import load_tokenizer, without_cleanup
from ..model import EquitapeForCausalLM
from ..runs.errors import first_line
from ..runs.folders import model_folder, runs_within
from .adapter import DESCRIPTION
from .adapting import load_adapter
from .families import translate_config
from .weights import as_dtype, convert, load_source, read_whole, reading, require_gguf


def is_gguf(name: str) -> bool:
    """Whether this is the path of an existing GGUF file."""
    path = Path(name).expanduser()
    return path.suffix == ".gguf" and path.is_file()


def is_adapter(name: str) -> bool:
    """Whether a folder holds an adapter."""
    return (Path(name).expanduser() / DESCRIPTION).is_file()


def check_model(name: str, base: str | None = None) -> None:
    """Raise ValueError, before anything is read, for what `load_model` cannot load."""
    if is_adapter(name):
        if base is None:
            raise ValueError(f"{name!r} is an adapter; give the model it was trained on with --base.")
        return
    if base is not None:
        raise ValueError(f"{name!r} is not an adapter, so --base {base!r} has no effect; drop it.")
    if is_gguf(name):
        return
    folder = model_folder(name)
    if not Path(folder).is_dir() and (Path(name).exists() or name.startswith((".", "/", "~")) or "/" not in name):
        raise ValueError(
            f"There is no model at {name!r}; give the folder of a saved model, a run or an adapter, a GGUF file, or a "
            "name on the Hub, OWNER/NAME."
        )
    if Path(folder).is_dir() and not (Path(folder) / "config.json").is_file():
        within = runs_within(name)
        if within:
            raise ValueError(f"{name!r} holds a comparison; give one of its runs, for example {within[0]!r}.")
        raise ValueError(
            f"The folder {name!r} has no config.json; give the folder of a saved model, a run or an adapter."
        )


def is_local(name: str) -> bool:
    """Whether this is a file or folder; other names refer to models on the Hugging Face Hub."""
    return Path(name).expanduser().exists()


def check_hub(name: str) -> None:
    """Raise ValueError if the model is neither local nor on the Hugging Face Hub."""
    try:
        AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"There is no folder {name!r} (relative to {Path.cwd()}), and no model of that name can be "
            f"fetched from the Hugging Face Hub ({first_line(error)})."
        ) from None


def load_model(name: str, dtype: str, base: str | None = None, as_ours: bool = True) -> Any:
    """Load a model in evaluation mode: a saved Equitape model, an adapter on `base`, or a model of another class.

    dtype: "auto" keeps the file's. as_ours: convert a model of another class to an Equitape decoder with the same
    outputs. Otherwise it keeps its class and may be any causal language model of transformers.
    """
    wanted = as_dtype(dtype)
    check_model(name, base)
    if base is not None:
        return load_adapter(base, name, dtype=wanted).eval()
    if is_gguf(name):
        source = load_source(Path(name).expanduser(), wanted)
        return (as_equitape(source) if as_ours else source).eval()
    folder = model_folder(name)
    with reading(name):
        config = AutoConfig.from_pretrained(folder)
    if as_ours and config.model_type != "equitape":
        return as_equitape(load_source(folder, wanted)).eval()
    return read_whole(folder, dtype=wanted).eval()


def as_equitape(source: PreTrainedModel) -> EquitapeForCausalLM:
    """Convert a pretrained model of a supported family to an Equitape decoder with the same outputs."""
    return convert(source, translate_config(source.config))


def load_tokenizer_of(name: str, base: str | None = None, given: str | None = None) -> Any:
    """The given tokenizer, or the one in the folder or GGUF file of a model or its base."""
    return tokenizer_of(base or (name if is_gguf(name) else model_folder(name)), given)


def choose_device(given: str | None = None) -> torch.device:
    """The given device, which must exist. Default: the accelerator if available, else the CPU."""
    if given is None:
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return found or torch.device("cpu")
    try:
        device = torch.device(given)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"Cannot use the device {given!r} ({first_line(error)}).") from None
    return device


LEAST_SHARE = 0.9
"""Models round up their vocabulary size; a tokenizer has at least this fraction of it."""


def tokenizer_of(base: str | Path, given: str | Path | None = None) -> Any:
    """The given tokenizer, or the one in the folder or GGUF file of a base."""
    path = Path(given if given is not None else base).expanduser()
    if is_gguf(str(path)):
        require_gguf(path)
        from transformers import AutoTokenizer

        return without_cleanup(AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name))
    try:
        return load_tokenizer(given if given is not None else base)
    except ValueError as error:
        hint = "" if given is not None else " Give the matching one with --tokenizer FOLDER."
        raise ValueError(f"{error}{hint}") from None


def check_vocabulary(tokenizer: Any, vocab_size: int) -> None:
    """Raise ValueError for a tokenizer that the model cannot have been trained with."""
    entries = len(tokenizer)
    if entries > vocab_size:
        raise ValueError(
            f"The tokenizer has {entries:,} entries, but the model has only {vocab_size:,}; some tokens would be "
            f"unknown to it. Use the tokenizer the model was trained with."
        )
    if entries < LEAST_SHARE * vocab_size:
        raise ValueError(
            f"The tokenizer has {entries:,} entries, but the model has {vocab_size:,}; it was trained with a different "
            f"one. Use that tokenizer."
        )
