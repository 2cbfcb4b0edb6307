"""Perplexity of an adapted model on several texts at several lengths, before training and after.

Every length scores the same tokens of a text: pieces as long as the longest length, of the documents that hold one. So
lengths differ in context alone.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from ..data.tokens import TokenStore
from ..tasks.perplexity import perplexity, spread_over_documents
from .settings import EvalSettings

TRAINED_ON = "training data"
"""What is scored when no other text is named."""


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
        pieces = spread_over_documents([len(document) for document in documents], max(lengths), settings.windows)
        for length in lengths:

            def advance(done: int, of: int, what: str = f"{name} at {length}") -> None:
                if progress is not None:
                    progress(what, done, of)

            with torch.autocast(device.type, torch.bfloat16) if bf16 else nullcontext():
                found = perplexity(model, documents, length, settings.stride, spans=pieces, progress=advance)
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
                    "piece": max(lengths),
                }
            )
    return entries


def is_current(before: Any) -> bool:
    """Whether scores from a file are of the tokens that `score` takes; older versions took others at each length."""
    return isinstance(before, list) and all("piece" in entry for entry in before)


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
