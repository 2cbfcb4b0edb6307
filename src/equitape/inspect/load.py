"""Parse user input to tokens: files, strings, numbers."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..nn import Measurable
from ..plugins import import_file
from ..pretrained.loading import load_tokenizer_of
from ..registry import counted

VISIBLE = {"\n": "⏎", "\t": "⇥", "\r": "␍"}


@dataclass(frozen=True, kw_only=True)
class Text:
    """A tokenized text."""

    input_ids: Tensor
    """[1, N]."""
    labels: list[str]
    total: int
    """Tokens of the full text; more than N if it was truncated."""
    begin_token: int
    """The token used as [BOS]."""
    note: str = ""
    """A note for the reader on its origin."""


def names_module(model: str) -> bool:
    """Whether a model is given as FILE.py:NAME."""
    return ".py:" in model


def load_module(model: str, dtype: str) -> Any:
    """The module that a file defines under a name, or that its function of that name returns, in evaluation mode."""
    path, _, name = model.rpartition(":")
    if not Path(path).is_file():
        raise ValueError(f"There is no file {path!r}; give FILE.py:NAME, or the folder of a model.")
    found = getattr(import_file(Path(path)), name, None)
    if found is None:
        raise ValueError(f"The file {path!r} defines no {name!r}; name a module or a function that returns one.")
    module = found if isinstance(found, nn.Module) else found()
    if not isinstance(module, nn.Module) or not isinstance(module, Measurable):
        raise ValueError(
            f"{name!r} of {path!r} is a {type(module).__name__}; it must be a module built from equitape.nn with a "
            f"method `sample(num_tokens, generator)` that returns an input and the ids of its tokens."
        )
    return module.to(getattr(torch, dtype)).eval()


def find_text(
    config: Any, model: str, base: str | None, tokenizer: str | None, text: str | None, ids: str | None, max_tokens: int
) -> Text:
    """The input tokens: `ids` as numbers, or `text` by the given tokenizer or the model's own."""
    if ids is not None:
        return read_numbers(ids, config.vocab_size, max_tokens, begin_token_of(config, None))
    assert text is not None
    try:
        loaded = load_tokenizer_of(model, base, tokenizer)
    except ValueError as error:
        if tokenizer is not None:
            raise
        raise ValueError(f"{error} For a model of a synthetic task, give token ids: --ids '3 1 4'.") from None
    return read_text(text, loaded, config.vocab_size, max_tokens, begin_token_of(config, loaded))


def read_numbers(given: str, vocab_size: int, max_tokens: int, begin_token: int) -> Text:
    """Parse token ids separated by spaces or commas, or a file of them."""
    words = read_string(given).replace(",", " ").split()
    wrong = [word for word in words if not (word.isascii() and word.isdigit())]
    if wrong:
        no_file = f" There is no file {given!r}." if names_missing_file(given) else ""
        raise ValueError(f"--ids contains {wrong[0]!r}; token ids are whole numbers from 0.{no_file}")
    ids = [int(word) for word in words]
    return make_text(ids, [str(number) for number in ids], vocab_size, max_tokens, begin_token)


def read_text(given: str, tokenizer: Any, vocab_size: int, max_tokens: int, begin_token: int) -> Text:
    """Tokenize a file or a string."""
    ids = tokenizer(read_string(given))["input_ids"]
    # truncate before labelling tokens one by one
    labels = [label_of(tokenizer, number) for number in ids[:max_tokens]]
    # not an error: words such as "and/or" and "example.com" are valid texts
    note = f"{given!r} was read as text, since no such file exists." if names_missing_file(given) else ""
    return make_text(ids, labels, vocab_size, max_tokens, begin_token, note)


def read_string(given: str) -> str:
    """The content of a file, or the string itself if no such file exists."""
    try:
        return Path(given).read_text(encoding="utf-8") if is_file(given) else given
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"Cannot read the file {given!r} as text ({error}).") from None


def is_file(given: str) -> bool:
    """Whether a file of this name exists."""
    try:
        return Path(given).is_file()
    except (OSError, ValueError):
        # too long for a file name, or with a null byte
        return False


def names_missing_file(given: str) -> bool:
    """Whether a string looks like a path, a single word with a suffix or separator, that does not exist."""
    if is_file(given) or len(given.split()) != 1 or given != given.strip():
        return False
    return bool(Path(given).suffix) or any(mark in given for mark in (os.sep, os.altsep) if mark)


def make_text(
    ids: list[int], labels: list[str], vocab_size: int, max_tokens: int, begin_token: int, note: str = ""
) -> Text:
    """Check the tokens and truncate them."""
    if max_tokens < 2:
        raise ValueError(f"max_tokens is {max_tokens}; it must be 2 or more.")
    kept = ids[:max_tokens]
    if len(kept) < 2:
        raise ValueError(f"The text has {counted(len(kept), 'token')}; at least 2 are needed.")
    wrong = [number for number in kept if not 0 <= number < vocab_size]
    if wrong:
        raise ValueError(f"Token {wrong[0]} is not in the model's vocabulary of {vocab_size}; use its own tokenizer.")
    return Text(
        input_ids=torch.tensor([kept]),
        labels=labels[:max_tokens],
        total=len(ids),
        begin_token=begin_token,
        note=note,
    )


def label_of(tokenizer: Any, number: int) -> str:
    """The text of a token with visible line breaks, or its name if it is part of a character."""
    text = tokenizer.decode([number])
    if not text or "\ufffd" in text:
        text = str(tokenizer.convert_ids_to_tokens(number))
    return "".join(VISIBLE.get(letter, letter) for letter in text)


def begin_token_of(config: Any, tokenizer: Any | None) -> int:
    """The id of [BOS]; without one, the end-of-text token, or token 0."""
    owners = [owner for owner in (tokenizer, config) if owner is not None]
    for name in ("bos_token_id", "eos_token_id"):
        for owner in owners:
            number = getattr(owner, name, None)
            if isinstance(number, int) and 0 <= number < config.vocab_size:
                return number
    return 0
