"""Adapter files: only what was trained, with a description of the base it belongs to.

adapter.safetensors   the trained tensors, by their names in the model
adapter.json          format, method and settings, the base's fingerprint, training, versions
README.md             the model card
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..encodings.base import ENCODINGS
from ..model import EquitapeForCausalLM
from ..runs.environment import describe_versions
from ..runs.files import files_in
from .card import CARD, PACKAGES, adapter_card
from .settings import METHODS, adaptation_of

FORMAT = 1
"""Raised when older versions of this package could not read what is written."""
TENSORS, DESCRIPTION = "adapter.safetensors", "adapter.json"


def save_adapter(model: EquitapeForCausalLM, directory: Path | str) -> None:
    """Write what the model's method trains, and nothing else, to a folder."""
    adaptation = adaptation_of(model)
    state = {name: parameter for name, parameter in model.named_parameters() if name in set(adaptation.trained)}
    lost = [name for name in adaptation.trained if name not in state]
    if lost:
        raise ValueError(
            f"The model has no {lost[0]!r} any more: LoRA was merged into its weights. Save it whole, with "
            f"model.save_pretrained({str(directory)!r})."
        )
    tensors = {name: parameter.detach().contiguous().cpu() for name, parameter in state.items()}
    with files_in(directory) as aside:
        save_file(tensors, aside / TENSORS, metadata={"format": "pt"})
        description = {
            "format": FORMAT,
            "method": adaptation.settings.method,
            "settings": adaptation.settings.to_dict(),
            "base": {"name": adaptation.base_name, **adaptation.base},
            "tensors": {
                "count": len(tensors),
                "parameters": sum(tensor.numel() for tensor in tensors.values()),
                "sha256": _digest(aside / TENSORS),
            },
            "training": adaptation.training,
            "versions": describe_versions(*PACKAGES),
        }
        (aside / DESCRIPTION).write_text(json.dumps(description, indent=2))
        (aside / CARD).write_text(adapter_card(model, adaptation))


def read_description(folder: Path) -> dict[str, Any]:
    """adapter.json, refused where this version cannot know what it means."""
    path = folder / DESCRIPTION
    if not path.is_file():
        raise ValueError(f"There is no adapter in {str(folder)!r}: it holds no {DESCRIPTION}.")
    try:
        description = json.loads(path.read_text())
        number = int(description["format"])
    except (ValueError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise ValueError(f"{str(path)!r} is damaged ({error}); save the adapter again.") from None
    if number > FORMAT:
        writer = description.get("versions", {}).get("equitape", "a later version")
        raise ValueError(
            f"{str(path)!r} has format {number}, written by equitape {writer}; this version reads up to {FORMAT}. "
            f"Upgrade equitape."
        )
    missing = [key for key in ("method", "settings", "base", "tensors", "training") if key not in description]
    if missing or description["method"] not in METHODS:
        reason = f"it lacks {missing[0]!r}" if missing else f"there is no method {description['method']!r}"
        raise ValueError(f"{str(path)!r} is damaged ({reason}); save the adapter again.")
    return description


def read_tensors(folder: Path, description: dict[str, Any]) -> dict[str, Tensor]:
    """The trained tensors, refused where they are not those the description was written with."""
    path = folder / TENSORS
    if not path.is_file():
        raise ValueError(f"The adapter in {str(folder)!r} lacks {TENSORS}.")
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{str(path)!r} is damaged ({error}); save the adapter again.") from None
    if len(tensors) == description["tensors"]["count"] and _digest(path) != description["tensors"]["sha256"]:
        raise ValueError(f"{str(path)!r} is not the file that {DESCRIPTION} describes; save the adapter again.")
    return tensors


def describe_difference(expected: dict[str, Any], found: dict[str, Any]) -> str | None:
    """The first thing in which two bases differ, or None."""
    for key, value in complete_architecture(expected["architecture"]).items():
        other = found["architecture"].get(key)
        if other != value:
            return f"its {key} is {other}, not {value}"
    if expected["weights"] != found["weights"]:
        return "it has the same sizes but other weights"
    return None


def complete_architecture(architecture: dict[str, Any]) -> dict[str, Any]:
    """A fingerprint's architecture with every option of its encoding: a file lacks those that are newer than it."""
    options = dict(architecture["encoding"])
    kind = options.pop("kind")
    complete = ENCODINGS[kind].options_class.parse(options, f"Encoding {kind!r}").to_dict()
    return {**architecture, "encoding": json.loads(json.dumps({"kind": kind, **complete}))}


def insert(model: EquitapeForCausalLM, tensors: dict[str, Tensor], names: tuple[str, ...], where: str) -> None:
    """Give the parameters of these names other tensors; the old ones, which a base may share, are not written to."""
    missing = [name for name in names if name not in tensors]
    foreign = [name for name in tensors if name not in names]
    if missing or foreign:
        reason = (
            f"lacks {len(missing)} tensors, for example {missing[0]!r}" if missing else f"holds {foreign[0]!r} besides"
        )
        raise ValueError(f"The adapter in {where!r} {reason}; its method trains {len(names)} tensors.")
    parameters = dict(model.named_parameters())
    for name in names:
        parameter, tensor = parameters[name], tensors[name]
        if tensor.shape != parameter.shape:
            raise ValueError(
                f"The adapter in {where!r} has {name!r} of shape {list(tensor.shape)}; the model's is "
                f"{list(parameter.shape)}."
            )
        parameter.data = tensor.to(device=parameter.device, dtype=parameter.dtype)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
