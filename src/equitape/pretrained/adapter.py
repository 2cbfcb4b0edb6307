"""Adapter files: the trained tensors and a description of their base.

adapter.safetensors   the trained tensors by parameter name
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
"""File format number; increased when older versions could not read a new file."""
TENSORS, DESCRIPTION = "adapter.safetensors", "adapter.json"
PARTS = {
    "method": str,
    "settings": dict,
    "base.architecture.encoding.kind": str,
    "base.weights": str,
    "tensors.count": int,
    "tensors.sha256": str,
    "training": dict,
}
"""Parts that a description must have, and their types."""


def trained_tensors(model: EquitapeForCausalLM) -> dict[str, Tensor]:
    """The whole tensors that the model's method trains, on the CPU.

    Of a sharded model, all processes must call this: each holds only a part of every tensor.
    """
    adaptation = adaptation_of(model)
    state = {name: parameter for name, parameter in model.named_parameters() if name in set(adaptation.trained)}
    lost = [name for name in adaptation.trained if name not in state]
    if lost:
        raise ValueError(
            f"The model no longer has {lost[0]!r}: LoRA was merged into its weights. Save the full model with "
            f"model.save_pretrained."
        )
    whole = {name: each.full_tensor() if hasattr(each, "full_tensor") else each for name, each in state.items()}
    return {name: tensor.detach().contiguous().cpu() for name, tensor in whole.items()}


def save_adapter(model: EquitapeForCausalLM, directory: Path | str, tensors: dict[str, Tensor] | None = None) -> None:
    """Write the tensors that the model's method trains to a folder. tensors: these; default: the model's."""
    adaptation = adaptation_of(model)
    tensors = trained_tensors(model) if tensors is None else tensors
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
    """Read adapter.json; raise ValueError if this version cannot interpret it."""
    path = folder / DESCRIPTION
    if not path.is_file():
        raise ValueError(f"There is no adapter in {str(folder)!r}: {DESCRIPTION} is missing.")
    try:
        description = json.loads(path.read_text())
        number = int(description["format"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{str(path)!r} is damaged ({error}); save the adapter again.") from None
    if number > FORMAT:
        writer = description.get("versions", {}).get("equitape", "a later version")
        raise ValueError(
            f"{str(path)!r} has format {number}, written by equitape {writer}; this version reads formats up to "
            f"{FORMAT}. Upgrade equitape."
        )
    reason = next((reason for name, kind in PARTS.items() if (reason := _find_damage(description, name, kind))), None)
    if reason is None and description["method"] not in METHODS:
        reason = f"unknown method {description['method']!r}"
    if reason is not None:
        raise ValueError(f"{str(path)!r} is damaged ({reason}); save the adapter again.")
    return description


def _find_damage(description: dict[str, Any], name: str, kind: type) -> str | None:
    """What is wrong with a part of a description, or None. name: its keys, joined by dots."""
    part: Any = description
    for key in name.split("."):
        if not isinstance(part, dict) or key not in part:
            return f"{name!r} is missing"
        part = part[key]
    return None if isinstance(part, kind) else f"{name!r} is {part!r}"


def read_tensors(folder: Path, description: dict[str, Any]) -> dict[str, Tensor]:
    """Read the trained tensors; raise ValueError if they do not match the description."""
    path = folder / TENSORS
    if not path.is_file():
        raise ValueError(f"The adapter in {str(folder)!r} has no {TENSORS}; save it again.")
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{str(path)!r} is damaged ({error}); save the adapter again.") from None
    if len(tensors) == description["tensors"]["count"] and _digest(path) != description["tensors"]["sha256"]:
        raise ValueError(f"{str(path)!r} does not match {DESCRIPTION}; save the adapter again.")
    return tensors


def describe_difference(expected: dict[str, Any], found: dict[str, Any]) -> str | None:
    """The first difference between two bases, or None."""
    for key, value in complete_architecture(expected["architecture"]).items():
        other = found["architecture"].get(key)
        if other != value:
            return f"its {key} is {other}, not {value}"
    if expected["weights"] != found["weights"]:
        return "it has the same sizes but different weights"
    return None


def complete_architecture(architecture: dict[str, Any]) -> dict[str, Any]:
    """A fingerprint's architecture with all options of its encoding, including those newer than the file."""
    options = dict(architecture["encoding"])
    kind = options.pop("kind")
    complete = ENCODINGS[kind].options_class.parse(options, f"Encoding {kind!r}").to_dict()
    return {**architecture, "encoding": json.loads(json.dumps({"kind": kind, **complete}))}


def insert(model: EquitapeForCausalLM, tensors: dict[str, Tensor], names: tuple[str, ...], where: str) -> None:
    """Replace the parameters with these names; the old tensors, which a base may share, are not modified."""
    missing = [name for name in names if name not in tensors]
    foreign = [name for name in tensors if name not in names]
    if missing or foreign:
        reason = f"lacks {len(missing)} tensors, for example {missing[0]!r}" if missing else f"also has {foreign[0]!r}"
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
