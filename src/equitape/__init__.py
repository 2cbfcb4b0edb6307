"""equitape: positional encodings that adapt to content, and the encodings they are compared with.

`import equitape` imports the model, which registers it with transformers' Auto classes. The `equitape` command skips
this, so that its help does not wait for torch; each command imports what it needs.
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .version import __version__

if TYPE_CHECKING:
    from .adapt import adapt, load_adapter
    from .encodings import available_encodings, register_encoding
    from .extend import extend
    from .model import (
        EquitapeConfig,
        EquitapeForCausalLM,
        EquitapeForQuestionAnswering,
        EquitapeForSequenceClassification,
        EquitapeForTokenClassification,
        EquitapeModel,
    )

__all__ = [
    "EquitapeConfig",
    "EquitapeForCausalLM",
    "EquitapeForQuestionAnswering",
    "EquitapeForSequenceClassification",
    "EquitapeForTokenClassification",
    "EquitapeModel",
    "__version__",
    "adapt",
    "available_encodings",
    "extend",
    "load_adapter",
    "register_encoding",
]


def _runs_as_command() -> bool:
    """Whether this process was started as `equitape ...` or `python -m equitape ...`."""
    started = sys.argv[0] if sys.argv else ""
    if started == "-m":
        module = sys.orig_argv.index("-m") + 1
        return sys.orig_argv[module : module + 1] == ["equitape"]
    return Path(started).name in ("equitape", "equitape.exe", "equitape-script.py")


def import_names() -> None:
    """Import all public names, which also registers the model with transformers."""
    places = {
        "adapt": "adapt",
        "load_adapter": "adapt",
        "extend": "extend",
        "available_encodings": "encodings",
        "register_encoding": "encodings",
    }
    found = {
        name: getattr(import_module(f"{__name__}.{places.get(name, 'model')}"), name)
        for name in __all__
        if name != "__version__"
    }
    # set names after the last import: the functions `adapt` and `extend` replace the packages of those names
    globals().update(found)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import_names()
    return globals()[name]


if not _runs_as_command():
    import_names()
