"""Model cards: what a folder contains, how it was made and how to load it."""

from dataclasses import fields
from typing import Any

from ..encodings import ENCODINGS
from ..model import EquitapeForCausalLM
from ..runs.environment import describe_versions
from ..settings import Settings, default_of
from .settings import Adaptation

CARD = "README.md"
PACKAGES = ("torch", "transformers", "peft", "accelerate", "safetensors")


def adapter_card(model: EquitapeForCausalLM, adaptation: Adaptation) -> str:
    """The README.md of an adapter."""
    loading = f"""from equitape import load_adapter

model = load_adapter("path/to/{adaptation.base_name}", "path/to/this/folder")"""
    what = (
        f"Trained weights for `{adaptation.base_name}`, which is not in this folder. Loading checks the base's "
        f"fingerprint and rejects other models."
    )
    return _card(model, adaptation, what, loading)


def model_card(model: EquitapeForCausalLM, adaptation: Adaptation) -> str:
    """The README.md of a full model."""
    loading = """import equitape  # registers the architecture with transformers
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("path/to/this/folder")"""
    what = f"`{adaptation.base_name}`, adapted: all weights, with LoRA merged."
    return _card(model, adaptation, what, loading)


def native_card(model: EquitapeForCausalLM, adaptation: Adaptation, architecture: str) -> str:
    """The README.md of a full model in its base's architecture."""
    loading = """from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("path/to/this/folder")"""
    what = f"`{adaptation.base_name}`, adapted: all weights of a `{architecture}`, with LoRA merged."
    return _card(model, adaptation, what, loading, library="transformers")


def _card(
    model: EquitapeForCausalLM, adaptation: Adaptation, what: str, loading: str, library: str = "equitape"
) -> str:
    settings = adaptation.settings
    assert isinstance(model.config.encoding, dict)
    trained = set(adaptation.trained)
    count = sum(parameter.numel() for name, parameter in model.named_parameters() if name in trained)
    facts = {
        "method": f"{settings.method}: {settings.effects.idea}",
        "context": f"{model.config.context} tokens",
        "positions": _shortened(model.config.encoding),
        "trained": f"{len(trained)} tensors, {count:,} parameters",
        "settings": settings.used(),
    }
    parts = [
        f"---\nlibrary_name: {library}\nbase_model: {adaptation.base_name}\npipeline_tag: text-generation\n"
        f"tags: [equitape, {settings.method}]\n---",
        f"# {adaptation.base_name}, {settings.method}",
        what,
        f"```python\n{loading}\n```",
        _table(facts),
        "## Training",
        _training(adaptation.training),
        "## Made with",
        ", ".join(f"{package} {number}" for package, number in describe_versions(*PACKAGES).items()) + ".",
    ]
    return "\n\n".join(parts) + "\n"


def _training(training: dict[str, Any]) -> str:
    if not training:
        return "Not trained with this package yet: outputs are those of the base with these positions."
    return _table(training)


def _shortened(encoding: dict[str, Any]) -> dict[str, Any]:
    """Kind and rotary base of an encoding, and the options that are not its defaults."""
    given = dict(encoding)
    kind = given.pop("kind")
    return {"kind": kind, **_unusual(ENCODINGS[kind].options_class.parse(given, kind))}


def _unusual(settings: Settings) -> dict[str, Any]:
    found = {}
    for entry in fields(settings):
        value = getattr(settings, entry.name)
        if value != default_of(entry) or (entry.name == "theta" and value is not None):
            found[entry.name] = _unusual(value) if isinstance(value, Settings) else value
    return found


def _table(facts: dict[str, Any]) -> str:
    rows = [f"| {name} | {_plain(value).replace('|', chr(92) + '|')} |" for name, value in facts.items()]
    return "\n".join(["| | |", "|---|---|", *rows])


def _plain(value: Any) -> str:
    """Words for a table: six digits of a number, lists and settings without brackets."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {_plain(entry)}" for key, entry in value.items())
    if isinstance(value, (list, tuple)):
        return " ".join(map(_plain, value)) or "none"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
