"""Serve saved models with vLLM (docs/how-to/production.md). Importing this package does not import vLLM."""

import warnings
from importlib.metadata import version

TESTED_VLLM = "0.32"
"""The release of vLLM that `make test-vllm` runs with."""


def register() -> None:
    """Entry point of vLLM's plugins (`vllm.general_plugins`): vLLM then serves folders written by `save_pretrained`."""
    from vllm import ModelRegistry

    # makes transformers read our configurations
    from .. import model  # noqa: F401

    warn_of_untested(installed_vllm())
    ModelRegistry.register_model("EquitapeForCausalLM", "equitape.serving.vllm:EquitapeForCausalLM")


def installed_vllm() -> str:
    """The version of the imported vLLM, whatever its distribution is called."""
    import vllm

    return str(getattr(vllm, "__version__", "")) or version("vllm")


def warn_of_untested(installed: str) -> None:
    """Warn if this release of vLLM is not the tested one: its model interface changes between releases."""
    if installed.split(".")[:2] != TESTED_VLLM.split("."):
        warnings.warn(
            f"equitape is tested with vLLM {TESTED_VLLM}.x; this is {installed}. If loading fails or answers differ "
            f"from those of `generate`, install vLLM {TESTED_VLLM}.",
            stacklevel=2,
        )
