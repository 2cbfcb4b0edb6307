"""Perplexity of an adapted model on several texts and lengths, before and after training.

Every length scores the same tokens of a text: pieces of the longest length, from documents that contain one. So lengths
differ only in context.
"""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch

from ..data.tokens import TokenStore
from ..tasks.perplexity import perplexity, spread_over_documents
from .settings import EvalSettings

TRAINED_ON = "training data"
"""Name of the scored text if none is given."""


def check_lengths(stores: dict[str, TokenStore], lengths: tuple[int, ...]) -> None:
    """Raise ValueError, before hours of training, if a text has no window of some length."""
    for name, store in stores.items():
        longest = int(store.lengths.max())
        for length in lengths:
            if longest <= length:
                raise ValueError(
                    f"Perplexity at length {length} needs a document of {length + 1} tokens; in {name!r}, the "
                    f"longest has {longest}. Remove that length, or give longer documents."
                )


def score(
    model: Any,
    stores: dict[str, TokenStore],
    settings: EvalSettings,
    lengths: tuple[int, ...],
    bf16: bool,
    progress: Callable[[str, int, int], None] | None = None,
) -> list[dict[str, Any]]:
    """One entry per text and length. bf16: run under autocast, as in training.

    progress: called with (what is scored, windows done, total windows).
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


def is_current(before: Any, texts: Iterable[str], lengths: tuple[int, ...]) -> bool:
    """Whether stored scores are of these texts and lengths, and of the tokens that `score` uses.

    Older versions used other tokens at each length.
    """
    wanted = [{"data": name, "length": length, "piece": max(lengths)} for name in texts for length in lengths]
    return (
        isinstance(before, list)
        and len(before) == len(wanted)
        and all(isinstance(entry, dict) and {"perplexity", "loss"} <= entry.keys() for entry in before)
        and all(each.items() <= entry.items() for each, entry in zip(wanted, before, strict=True))
    )


def join_scores(before: list[dict[str, Any]], after: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Join both lists: perplexity_before, perplexity_after (None if training failed)."""
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
