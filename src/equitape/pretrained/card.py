"""Model cards: what a folder contains, how it was made and how to load it."""

from typing import Any

from ..model import EquitapeForCausalLM
from ..runs.environment import describe_versions
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


def _card(model: EquitapeForCausalLM, adaptation: Adaptation, what: str, loading: str) -> str:
    settings = adaptation.settings
    assert isinstance(model.config.encoding, dict)
    trained = set(adaptation.trained)
    count = sum(parameter.numel() for name, parameter in model.named_parameters() if name in trained)
    facts = {
        "method": f"{settings.method}: {settings.effects.idea}",
        "context": f"{model.config.context} tokens",
        "positions": _plain(_shortened(model.config.encoding)),
        "trained": f"{len(trained)} tensors, {count:,} parameters",
        "settings": _plain(settings.used()),
    }
    parts = [
        f"---\nlibrary_name: equitape\nbase_model: {adaptation.base_name}\npipeline_tag: text-generation\n"
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
    return _table({key: _plain(value) if isinstance(value, dict) else value for key, value in training.items()})


def _shortened(encoding: dict[str, Any]) -> dict[str, Any]:
    """An encoding without a scaling that has no effect."""
    scaling = {key: value for key, value in encoding.get("scaling", {}).items() if value is not None}
    plain = {key: value for key, value in encoding.items() if key != "scaling"}
    return {**plain, "scaling": scaling} if scaling.get("kind", "default") != "default" else plain


def _table(facts: dict[str, Any]) -> str:
    rows = [f"| {name} | {str(value).replace('|', chr(92) + '|')} |" for name, value in facts.items()]
    return "\n".join(["| | |", "|---|---|", *rows])


def _plain(value: dict[str, Any]) -> str:
    return ", ".join(f"{key} {_plain(entry) if isinstance(entry, dict) else entry}" for key, entry in value.items())
