"""From a pretrained model to a longer context, proven before and after (docs/how-to/extend.md)."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from ..runs.extension import Extension

__all__ = ["extend"]


def extend(
    base: str | Path,
    to: int,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    console: "Console | None" = None,
    **options: Any,
) -> "Extension":
    """Extend a pretrained model to a context of `to` tokens, and measure it before and after on held-out text.

    base: a folder with safetensors, a GGUF file or a name on the Hub, of a family that `equitape.adapt` takes.
    out: the folder of adapter, model card and report; default: runs/extend/BASE-TO. resume: continue after a kill.
    console: shows progress. options: as in `ExtendSettings`: minutes, steps, method, data, eval_data, tolerance, ...

    `result.verdict.success` says whether the model reads more without losing quality at short lengths, and
    `result.verdict.sentence` why not. Load the model with `equitape.load_adapter(base, out)`.
    """
    # the training loop takes seconds to import
    from .prepare import default_folder, prepare
    from .run import run
    from .settings import ExtendSettings

    settings = ExtendSettings.parse({"to": to, **options}, "extend")
    prepared = prepare(base, settings)
    return run(
        prepared, Path(out) if out is not None else default_folder(base, settings), resume=resume, console=console
    )
