"""From what a user types to a model and its tokenizer: saved models, runs, adapters, GGUF files, or any other."""

import sys
from pathlib import Path
from typing import Any

import torch

from .registry import describe_choices

DTYPES = {
    "auto": "auto",
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def model_folder(name: str) -> str:
    """The folder that holds the weights: a run keeps them in `model/`."""
    inner = Path(name).expanduser() / "model"
    return str(inner) if (inner / "config.json").is_file() else name


def is_gguf(name: str) -> bool:
    """Whether this names a GGUF file that is there."""
    path = Path(name).expanduser()
    return path.suffix == ".gguf" and path.is_file()


def is_adapter(name: str) -> bool:
    """Whether a folder holds an adapter of ours."""
    from .adapt.adapter import DESCRIPTION

    return (Path(name).expanduser() / DESCRIPTION).is_file()


def check_model(name: str, base: str | None = None) -> None:
    """Refuse, before anything is read, what `load_model` could not load."""
    if is_adapter(name):
        if base is None:
            raise ValueError(f"{name!r} holds an adapter; name the model it was trained on with --base.")
        return
    if base is not None:
        raise ValueError(f"{name!r} holds no adapter, so --base {base!r} plays no part; leave it out.")
    if is_gguf(name):
        return
    folder = model_folder(name)
    if not Path(folder).is_dir() and (Path(name).exists() or name.startswith((".", "/", "~")) or "/" not in name):
        raise ValueError(
            f"There is no model at {name!r}; give the folder of a saved model, a run or an adapter, or a GGUF file."
        )
    if Path(folder).is_dir() and not (Path(folder) / "config.json").is_file():
        raise ValueError(
            f"The folder {name!r} holds no config.json; give that of a saved model, of a run or an adapter."
        )


def is_local(name: str) -> bool:
    """Whether this is a file or a folder; other names are of models on the Hugging Face Hub."""
    return Path(name).expanduser().exists()


def check_hub(name: str) -> None:
    """Refuse the name of a model that is neither here nor on the Hugging Face Hub."""
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"There is no folder {name!r} here (relative ones start at {Path.cwd()}), and no model of that name can be "
            f"fetched from the Hugging Face Hub ({_first_line(error)})."
        ) from None


def load_model(name: str, dtype: str, base: str | None = None, as_ours: bool = True) -> Any:
    """A model in evaluation mode: one of ours, an adapter on top of `base`, or a pretrained one of another class.

    dtype: "auto" keeps the file's. as_ours: turn others into one of ours, with the same outputs; otherwise they stay
    what they are, and may be any causal language model of transformers.
    """
    import transformers
    from safetensors import SafetensorError
    from transformers import AutoConfig

    from .adapt import adapt, load_adapter
    from .adapt.weights import load_source, read_whole

    if not sys.stderr.isatty():
        transformers.logging.disable_progress_bar()
    if dtype not in DTYPES:
        raise ValueError(f"There is no dtype {dtype!r} here.{describe_choices(dtype, DTYPES)}")
    wanted: Any = DTYPES[dtype]
    check_model(name, base)
    if base is not None:
        return load_adapter(base, name, dtype=wanted).eval()
    if is_gguf(name):
        path = Path(name).expanduser()
        return (adapt(path, "full", dtype=wanted) if as_ours else load_source(path, wanted)).eval()
    folder = model_folder(name)
    try:
        config = AutoConfig.from_pretrained(folder)
        ours = config.model_type == "equitape"
        if as_ours and not ours:
            return adapt(folder, "full", dtype=wanted).eval()
    except (OSError, SafetensorError) as error:
        raise ValueError(f"The model {name!r} cannot be read ({_first_line(error)}).") from error
    try:
        return read_whole(folder, dtype=wanted).eval()
    except (OSError, ValueError, SafetensorError) as error:
        if ours and isinstance(error, ValueError):
            raise
        # transformers goes on to list all its architectures
        raise ValueError(f"The model {name!r} cannot be read ({_first_line(error)}).") from error


def load_tokenizer_of(name: str, base: str | None = None, given: str | None = None) -> Any:
    """The tokenizer asked for, or the one that lies beside a model, its base or in its GGUF file."""
    from .adapt.vocabulary import tokenizer_of

    return tokenizer_of(base or (name if is_gguf(name) else model_folder(name)), given)


def choose_device(given: str | None = None) -> torch.device:
    """The device asked for, which must be there; the accelerator or the CPU when left out."""
    if given is None:
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return found or torch.device("cpu")
    try:
        device = torch.device(given)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"The device {given!r} cannot be used ({_first_line(error)}).") from None
    return device


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
