"""The tokenizer of a base, and whether it fits the model."""

from pathlib import Path
from typing import Any

from ..data.tokenizers import load_tokenizer
from .weights import require_gguf

LEAST_SHARE = 0.9
"""Models round their vocabularies up; a tokenizer has at least this share of the entries."""


def tokenizer_of(base: str | Path, given: str | Path | None = None) -> Any:
    """The tokenizer in the folder or GGUF file of a base, or the given one instead."""
    path = Path(given if given is not None else base).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        require_gguf(path)
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    try:
        return load_tokenizer(given if given is not None else base)
    except ValueError as error:
        hint = "" if given is not None else " Name the folder of the right one with --tokenizer FOLDER."
        raise ValueError(f"{error}{hint}") from None


def check_vocabulary(tokenizer: Any, vocab_size: int) -> None:
    """Refuse a tokenizer that cannot be the one a model was trained with."""
    entries = len(tokenizer)
    if entries > vocab_size:
        raise ValueError(
            f"The tokenizer has {entries:,} entries and the model only {vocab_size:,}: it would make tokens that the "
            f"model does not know. Use the tokenizer the model was trained with."
        )
    if entries < LEAST_SHARE * vocab_size:
        raise ValueError(
            f"The tokenizer has {entries:,} entries and the model {vocab_size:,}: it is not the one the model was "
            f"trained with. Use that one."
        )
