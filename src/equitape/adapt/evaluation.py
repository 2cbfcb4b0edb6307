"""Perplexity of an adapted model on several texts at several lengths, before training and after."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from ..data.tokens import TokenStore
from ..settings import Settings
from ..tasks.perplexity import perplexity

TRAINED_ON = "training data"
"""What is scored when no other text is named."""


@dataclass(frozen=True, kw_only=True)
class EvalSettings(Settings):
    """Which texts are scored, at which lengths, how thoroughly."""

    data: dict[str, str] = field(default_factory=dict)
    """Sources of text by the names that reports give them; the training data when there are none."""
    lengths: tuple[int, ...] = ()
    """Tokens in a window; the context trained for when there are none."""
    stride: int | None = None
    """Tokens between the starts of two windows; the length when left out."""
    windows: int | None = 32
    """Windows of each text and length, spread evenly; None takes all."""

    def __post_init__(self) -> None:
        wrong = [length for length in self.lengths if not isinstance(length, int) or length < 1]
        if wrong:
            raise ValueError(f"Perplexity cannot be had at a length of {wrong[0]!r}; give whole numbers of 1 or more.")
        if self.windows is not None and self.windows < 1:
            raise ValueError(f"windows is {self.windows}; it must be 1 or more, or left out to take all.")
        if self.stride is not None and self.lengths and not 1 <= self.stride <= min(self.lengths):
            raise ValueError(
                f"The stride must be from 1 to the shortest length, {min(self.lengths)}, or tokens are left out; it is "
                f"{self.stride}."
            )


def check_lengths(stores: dict[str, TokenStore], lengths: tuple[int, ...]) -> None:
    """Refuse, before hours of training, a text without a single window of some length."""
    for name, store in stores.items():
        longest = int(store.lengths.max())
        for length in lengths:
            if longest <= length:
                raise ValueError(
                    f"No document of {name!r} has the {length + 1} tokens that perplexity at {length} needs; the "
                    f"longest has {longest}. Leave out that length, or name longer documents."
                )


def score(
    model: Any,
    stores: dict[str, TokenStore],
    settings: EvalSettings,
    lengths: tuple[int, ...],
    bf16: bool,
    progress: Callable[[str, int, int], None] | None = None,
) -> list[dict[str, Any]]:
    """One entry for each text and length. bf16: run under autocast, as training does.

    progress: called with (what is scored, windows done, windows in all).
    """
    device = next(model.parameters()).device
    entries = []
    for name, store in stores.items():
        documents = [store.document(index) for index in range(len(store))]
        for length in lengths:

            def advance(done: int, of: int, what: str = f"{name} at {length}") -> None:
                if progress is not None:
                    progress(what, done, of)

            with torch.autocast(device.type, torch.bfloat16) if bf16 else nullcontext():
                found = perplexity(
                    model, documents, length, settings.stride, max_windows=settings.windows, progress=advance
                )
            entries.append(
                {
                    "data": name,
                    "length": length,
                    "perplexity": found.perplexity,
                    "loss": found.loss,
                    "tokens": found.tokens,
                    "windows": found.windows,
                    "documents": found.documents,
                    "stride": found.stride,
                }
            )
    return entries


def beside(before: list[dict[str, Any]], after: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Both in one list: perplexity_before, perplexity_after (None where training did not end well)."""
    joined = []
    for number, entry in enumerate(before):
        later = after[number] if after is not None else {"perplexity": None, "loss": None}
        facts = {key: value for key, value in entry.items() if key not in ("perplexity", "loss")}
        joined.append(
            {
                **facts,
                "perplexity_before": entry["perplexity"],
                "perplexity_after": later["perplexity"],
                "loss_before": entry["loss"],
                "loss_after": later["loss"],
            }
        )
    return joined
