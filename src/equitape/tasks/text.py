"""Language modelling on text, scored at the trained length and at multiples of it.

Every length scores the same tokens: pieces of the held-out documents as long as the longest length, cut into windows
that do not overlap, so that lengths differ in context alone.
"""

import logging
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..data.overlap import describe_overlap, find_overlap
from ..data.packing import PackedDataset, collate_rows
from ..data.streaming import StreamedRows
from ..data.text import read_documents
from ..data.tokenizers import cached_bpe, load_tokenizer
from ..data.tokens import TokenStore, build_tokens, special_tokens
from ..runs.results import BITS_PER_BYTE, PERPLEXITY
from ..settings import Ge, OrOne, Positive, Settings
from .base import ENDLESS, Curve, Evaluation, Task
from .perplexity import PerplexityResult, perplexity, spread_evenly

BPE_PREFIX = "bpe:"
logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TextOptions(Settings):
    """Options of the text task."""

    train: str | tuple[str, ...] = ()
    """Text to train on: files, folders, archives, .jsonl, or hf:NAME:CONFIG:SPLIT; one or a list."""
    valid: str | tuple[str, ...] = ()
    """Text held out for evaluation, likewise."""
    tokenizer: str = "bytes"
    """"bytes"; "bpe:SIZE" for a vocabulary trained on the training text; or a folder that holds a tokenizer."""
    length: Annotated[int, Ge(2)] = 1024
    """Tokens per training row."""
    factors: Annotated[tuple[Positive, ...], OrOne] = (1, 2, 4, 8)
    """Evaluated lengths, as multiples of the trained length."""
    eval_tokens: Positive = 262144
    """Maximum scored tokens per length."""
    valid_documents: int | None = None
    """Use only the first held-out documents, at most this many; default: all."""
    min_document_tokens: int = 1
    """Shorter training documents are left out."""
    whole_rows: bool = False
    """Train only on rows from a single document; the rest of each document is dropped."""
    join: bool = False
    """Score the held-out documents as one, joined by end tokens; for collections of short ones."""
    stream: bool = False
    """Tokenize while training instead of once into the cache, for text that does not fit on disk."""
    cache: str | None = None
    """Folder of the token cache; default: $EQUITAPE_CACHE or ~/.cache/equitape."""

    def __post_init__(self) -> None:
        if 1 not in self.factors:
            raise ValueError(f"factors is {list(self.factors)}; 1 must be among them, for example [1, 2, 4, 8].")


class Text(Task):
    """Predict the next token of documents."""

    name = "text"
    idea = "language modelling on local text or a dataset, scored at the trained length and at multiples of it"
    options_class = TextOptions
    options: TextOptions
    headline = "bits_per_byte_1x"
    higher_is_better = False
    metrics = (BITS_PER_BYTE, PERPLEXITY)

    def __init__(self, options: TextOptions):
        super().__init__(options)
        for which in ("train", "valid"):
            sources = getattr(options, which)
            if not sources:
                raise ValueError(f"Task 'text' has no text: set the option {which} to a file, a folder or an archive.")
            try:
                # a missing path raises before any work
                read_documents(sources)
            except ValueError as error:
                hint = "To try a recipe without its data, add --small."
                raise ValueError(f"Task 'text', option {which}: {error} {hint}") from None
        self.tokenizer = self._choose_tokenizer()
        self.vocab_size = len(self.tokenizer)
        self.eos_token_id = self.tokenizer.eos_token_id
        self.pad_token_id = special_tokens(self.tokenizer)["pad_id"]
        self._pieces = self._cut()

    def _choose_tokenizer(self) -> Any:
        given = self.options.tokenizer
        forgotten = given == BPE_PREFIX.rstrip(":") and not Path(given).exists()
        if not given.startswith(BPE_PREFIX) and not forgotten:
            return load_tokenizer(given)
        size = given.removeprefix(BPE_PREFIX)
        if not size.isdigit():
            raise ValueError(f"Task 'text': the tokenizer {given!r} must say the size of its vocabulary, as bpe:8192.")
        return cached_bpe(self.options.train, int(size), self.options.cache)

    @cached_property
    def valid_store(self) -> TokenStore:
        """Tokens of the held-out text."""
        return build_tokens(self.options.valid, self.tokenizer, self.options.cache, self.options.valid_documents)

    @cached_property
    def train_store(self) -> TokenStore:
        """Tokens of the text to train on."""
        return build_tokens(self.options.train, self.tokenizer, self.options.cache)

    @property
    def data_digest(self) -> str:
        # streamed text is only known after reading all of it
        trained = "streamed" if self.options.stream else self.train_store.facts.digest
        return f"{trained} {self.valid_store.facts.digest}"

    @cached_property
    def warning(self) -> str:
        """A warning if held-out text is also trained on. Streamed text is not compared: that would read all of it."""
        if self.options.stream:
            return ""
        return describe_overlap("the held-out text", find_overlap(self.train_store, self.valid_store))

    def lengths(self) -> tuple[int, int]:
        return self.options.length, self.options.length * max(self.options.factors)

    def training_set(self, seed: int) -> Dataset[dict[str, Tensor]]:
        options = self.options
        rows = {
            "seed": seed,
            "size": ENDLESS,
            "min_tokens": options.min_document_tokens,
            "drop_remainders": options.whole_rows,
        }
        if options.stream:
            return StreamedRows(options.train, self.tokenizer, options.length, **rows)  # type: ignore[arg-type]
        return PackedDataset(self.train_store, options.length, **rows)  # type: ignore[arg-type]

    def collate(self, examples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        return collate_rows(examples)

    def _cut(self) -> list[Tensor]:
        """Pieces of the held-out documents, each of the longest length plus one token to predict."""
        store, size = self.valid_store, self.tested_length
        documents = [store.joined()] if self.options.join else [store.document(n, end=False) for n in range(len(store))]
        pieces = [
            document[start : start + size + 1]
            for document in documents
            for start in range(0, len(document) - size, size)
        ]
        if not pieces:
            longest = max(len(document) for document in documents)
            raise ValueError(
                f"Task 'text': the longest of the held-out documents has {longest} tokens, and {size + 1} are needed "
                f"to score {max(self.options.factors)} times the length of {self.options.length}; give longer text, "
                f"set join to true, or choose a smaller length or factors."
            )
        return pieces

    def evaluate(self, model: Any, seed: int, share: float = 1.0) -> Evaluation:
        """Loss, perplexity and bits per byte at every length; NaN where an encoding cannot run that length."""
        wanted = max(1, int(self.options.eval_tokens * min(share, 1.0)) // self.tested_length)
        count = len(self._pieces)
        pieces = [self._pieces[index] for index in spread_evenly(count, min(wanted, count))]
        metrics: dict[str, float] = {}
        lengths: list[float] = []
        perplexities: list[float] = []
        longest: PerplexityResult | None = None
        for factor in sorted(set(self.options.factors)):
            length = factor * self.options.length
            result = self._score(model, pieces, length, must_run=factor == 1)
            loss = result.loss if result else math.nan
            suffix = f"{factor}x" if factor == 1 else f"outside_{factor}x"
            metrics[f"bits_per_byte_{suffix}"] = loss / math.log(2) * self._tokens_per_byte
            metrics[f"perplexity_{suffix}"] = result.perplexity if result else math.nan
            lengths.append(float(length))
            perplexities.append(metrics[f"perplexity_{suffix}"])
            longest = result or longest
        assert longest is not None
        places, losses = longest.position_curve()
        return Evaluation(
            metrics=metrics,
            curves=[
                Curve(
                    title="Perplexity against length",
                    x_label="tokens read at once",
                    x=lengths,
                    y_label="perplexity",
                    y=perplexities,
                ),
                Curve(
                    title="Loss against place",
                    x_label="tokens before the predicted one",
                    x=places,
                    y_label="nats per token",
                    y=losses,
                ),
            ],
        )

    @property
    def _tokens_per_byte(self) -> float:
        """Of the held-out text in UTF-8; end tokens count only where they are scored."""
        store = self.valid_store
        ends = len(store) if store.facts.end_id is not None and not self.options.join else 0
        return (store.num_tokens - ends) / int(store.num_bytes.sum())

    def _score(self, model: Any, pieces: list[Tensor], length: int, must_run: bool) -> PerplexityResult | None:
        try:
            return perplexity(model, pieces, length, batch_tokens=max(16384, length))
        except (ValueError, torch.OutOfMemoryError) as error:
            # a learned table ends and a dense bias may not fit in memory: a result, not a failure
            if must_run:
                raise
            logger.warning("Length %d cannot be scored: %s", length, error)
            return None
