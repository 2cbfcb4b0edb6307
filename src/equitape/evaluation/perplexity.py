"""Perplexity by length: sliding windows over long documents, with the loss at every place of a window.

`equitape.tasks.perplexity` has the protocol: which windows there are and which of their predictions count. A unit is
one document at one length.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from ..data.text import short_names
from ..data.tokens import TokenStore, build_tokens
from ..registry import describe_choices
from ..settings import Settings
from ..tasks.base import Curve
from ..tasks.perplexity import SCORE_RULES, PerplexityResult, cut_windows, perplexity
from .base import Advance, EvaluationTask, Record, Report, Unit, check_lengths
from .lengths import split_by_context
from .subject import Subject

SHORTEST, LONGEST = 256, 65536
CURVE_POINTS = 64
MOST_BATCH_TOKENS = 131072
"""Longer batches make nothing faster."""


@dataclass(frozen=True, kw_only=True)
class PerplexityOptions(Settings):
    """Options of perplexity by length."""

    data: str | tuple[str, ...] | dict[str, str] = field(default_factory=dict)
    """Text to score: a file, a folder, an archive, a list of them, or several by names of their own: {books: PATH}."""
    lengths: tuple[int, ...] = ()
    """Tokens a window reads; powers of two from 256 to twice the model's context, as the text allows, when left out."""
    short: int = SHORTEST
    """A short length that is always measured too."""
    stride: int | None = None
    """Tokens between the beginnings of two windows; the length when left out. LongLoRA's is 256."""
    score: str = "new"
    """Which predictions count: "new", those no earlier window has made; or "all", as LongLoRA's code."""
    windows: int | None = None
    """Most windows of one document at one length, spread evenly; all when left out."""
    join: bool = False
    """Read all documents of a text as one, joined by end marks."""

    def __post_init__(self) -> None:
        lengths = check_lengths((*self.lengths, self.short), "perplexity")
        if self.stride is not None and not 1 <= self.stride <= lengths[0]:
            raise ValueError(
                f"Task 'perplexity': the stride must be from 1 to the shortest length, {lengths[0]}, or tokens are "
                f"left out; it is {self.stride}."
            )
        if self.windows is not None and self.windows < 1:
            raise ValueError(f"Task 'perplexity': windows is {self.windows}; it must be 1 or more.")
        if self.score not in SCORE_RULES:
            raise ValueError(
                f"Task 'perplexity': unknown rule of scoring {self.score!r}.{describe_choices(self.score, SCORE_RULES)}"
            )

    @property
    def sources(self) -> dict[str, str]:
        """Texts by name."""
        if isinstance(self.data, dict):
            return self.data
        given = (self.data,) if isinstance(self.data, str) else self.data
        return name_sources(given)


class Perplexity(EvaluationTask):
    """Predict the next token of long documents."""

    name = "perplexity"
    idea = "sliding windows over long documents at many lengths, with the loss at every place"
    options_class = PerplexityOptions
    options: PerplexityOptions
    headline = "perplexity"
    higher_is_better = False

    def prepare(self, subject: Subject) -> list[Unit]:
        options = self.options
        if not options.sources:
            raise ValueError(
                "Task 'perplexity' has no text: nothing was named by its option data, and none comes with equitape. "
                "Give a file, a folder or a place inside an archive, as data=books.tar.xz/books/test, or several by "
                "name, as data={books: PATH, proofs: PATH}."
            )
        self.stores = {name: build_tokens(source, subject.tokenizer) for name, source in options.sources.items()}
        self.documents = {name: self.read(store) for name, store in self.stores.items()}
        self.lengths = lengths = self.choose_lengths(subject.context)
        units = []
        for name, documents in self.documents.items():
            # the same documents at every length, so that lengths differ in context alone
            kept = [number for number, (tokens, _) in enumerate(documents) if len(tokens) > lengths[-1]]
            if not kept:
                longest = max(len(tokens) for tokens, _ in documents)
                raise ValueError(
                    f"Task 'perplexity': no document of {name!r} has the {lengths[-1] + 1} tokens that the length "
                    f"{lengths[-1]} needs; the longest has {longest}. Leave that length out, name longer documents, or "
                    f"read them as one by join=true."
                )
            for length in lengths:
                for number in kept:
                    place = {"data": name, "length": length, "document": number, "of": len(documents)}
                    count = len(self.cut(len(documents[number][0]), length))
                    units.append(Unit(key=f"{name}/{length}/{number}", length=length, rows=count, content=place))
        return units

    def identity(self) -> dict[str, Any]:
        digests = {name: store.facts.digest for name, store in self.stores.items()}
        return {"lengths": list(self.lengths), "data": digests}

    def read(self, store: TokenStore) -> list[tuple[torch.Tensor, int]]:
        """Tokens and bytes of each document, end marks not scored unless documents are joined."""
        if self.options.join:
            return [(store.joined(), int(store.num_bytes.sum()))]
        return [(store.document(number, end=False), int(store.num_bytes[number])) for number in range(len(store))]

    def choose_lengths(self, context: int | None) -> tuple[int, ...]:
        """Those asked for, or all that the text allows."""
        given = self.options.lengths
        if not given:
            longest = min(max(len(tokens) for tokens, _ in documents) for documents in self.documents.values()) - 1
            limit = min(2 * (context or LONGEST), longest, LONGEST)
            given = tuple(SHORTEST * 2**power for power in range(9) if SHORTEST * 2**power <= limit)
        return check_lengths((*given, self.options.short), self.name)

    def cut(self, tokens: int, length: int) -> list[Any]:
        """The windows of a document, as many as count."""
        windows = cut_windows(0, tokens, length, self.options.stride or length, self.options.score)
        return windows[: self.options.windows]

    def answer(self, subject: Subject, units: list[Unit], batch_tokens: int, advance: Advance) -> list[Record]:
        return [self.score(subject, unit, min(batch_tokens, MOST_BATCH_TOKENS), advance) for unit in units]

    def score(self, subject: Subject, unit: Unit, batch_tokens: int, advance: Advance) -> Record:
        """One document at one length: sums, which add up over documents."""
        place = unit.content
        tokens, num_bytes = self.documents[place["data"]][place["document"]]
        subject.check_table(unit.length)
        done = 0

        def progress(count: int, of: int) -> None:
            nonlocal done
            advance(unit.cost * (count - done) / of)
            done = count

        found = perplexity(
            subject.model,
            [tokens],
            unit.length,
            self.options.stride,
            score=self.options.score,
            max_windows=self.options.windows,
            batch_tokens=batch_tokens,
            progress=progress,
        )
        return {
            **place,
            "loss_sum": found.loss * found.tokens,
            "tokens": found.tokens,
            "windows": found.windows,
            "document_tokens": len(tokens),
            "document_bytes": num_bytes,
            **curve_sums(found),
        }

    def report(self, records: list[Record], facts: dict[str, Any]) -> Report:
        names = list(dict.fromkeys(record["data"] for record in records))
        lengths = sorted({record["length"] for record in records})
        context = facts["model"]["context"]
        metrics: dict[str, float] = {}
        short: dict[str, float] = {}
        curves, notes = [], []
        for name in names:
            suffix = f"_{name}" if len(names) > 1 else ""
            totals = {length: total(records, name, length) for length in lengths}
            values = {length: math.exp(min(sums["loss"], 700.0)) for length, sums in totals.items()}
            inside = split_by_context(lengths, context).get("inside", [])
            longest = (inside or lengths)[-1]
            # the headline: as much context as the model is meant for
            metrics[f"perplexity{suffix}"] = values[longest]
            metrics |= {f"perplexity{suffix}_{length}": value for length, value in values.items()}
            metrics |= {f"bits_per_byte{suffix}_{length}": sums["bits"] for length, sums in totals.items()}
            short[f"perplexity{suffix}_{self.options.short}"] = values.get(self.options.short, math.nan)
            curves.append(
                Curve(
                    title=f"Perplexity of {name} against length",
                    x_label="tokens of the window",
                    x=[float(length) for length in lengths],
                    y_label="perplexity",
                    y=list(values.values()),
                )
            )
            places, losses = join_curves([r for r in records if (r["data"], r["length"]) == (name, lengths[-1])])
            curves.append(
                Curve(
                    title=f"Loss of {name} against place, windows of {lengths[-1]}",
                    x_label="tokens before the predicted one",
                    x=places,
                    y_label="nats per token",
                    y=losses,
                )
            )
            used = [record for record in records if (record["data"], record["length"]) == (name, lengths[0])]
            counted = ", ".join(f"{int(sums['tokens'])} at {length}" for length, sums in totals.items())
            notes.append(
                f"{name}: {len(used)} of {used[0]['of']} documents, those with more than {lengths[-1]} tokens, at "
                f"every length. Predictions that counted: {counted}."
            )
        stride = self.options.stride
        rule = (
            "those that no earlier window of the document has made"
            if self.options.score == "new"
            else "all of every window, as in LongLoRA's code"
        )
        return Report(
            protocol=[
                f"Windows of the stated lengths {f'begin every {stride} tokens' if stride else 'do not overlap'}; "
                f"predictions that count: {rule}."
                + (f" At most {self.options.windows} windows of a document." if self.options.windows else ""),
                f"The headline is at {longest} tokens{describe_headline(context, bool(inside))}.",
            ],
            metrics=metrics,
            short=short,
            notes=notes,
            curves=curves,
        )


def describe_headline(context: int | None, inside: bool) -> str:
    """Why it is at that length."""
    if context is None:
        return ""
    if inside:
        return f", the longest inside the model's context of {context}"
    return f", the longest; all are beyond the model's context of {context}"


def name_sources(given: tuple[str, ...]) -> dict[str, str]:
    """Sources by their short names."""
    names = short_names(given)
    for name, source in zip(names, given, strict=True):
        if names.count(name) > 1:
            raise ValueError(f"Task 'perplexity': the text {source!r} is named twice in data; name it once.")
    return dict(zip(names, given, strict=True))


def curve_sums(found: PerplexityResult) -> dict[str, list[float]]:
    """The losses at the places of a window as sums over equal runs of places, and how many predictions are in each."""
    counts = found.position_counts.double()
    sums = found.position_losses.nan_to_num() * counts
    runs = torch.arange(found.length).tensor_split(min(CURVE_POINTS, found.length))
    return {
        "curve_places": [float(run.double().mean()) + 1 for run in runs],
        "curve_sums": [float(sums[run].sum()) for run in runs],
        "curve_counts": [float(counts[run].sum()) for run in runs],
    }


def join_curves(records: list[Record]) -> tuple[list[float], list[float]]:
    """(places, mean losses) over documents; runs of places without a prediction are left out."""
    sums = [math.fsum(column) for column in zip(*(record["curve_sums"] for record in records), strict=True)]
    counts = [math.fsum(column) for column in zip(*(record["curve_counts"] for record in records), strict=True)]
    kept = [(place, s / n) for place, s, n in zip(records[0]["curve_places"], sums, counts, strict=True) if n]
    return [place for place, _ in kept], [loss for _, loss in kept]


def total(records: list[Record], name: str, length: int) -> dict[str, float]:
    """Loss in nats per token, bits per byte and predictions of a text at a length."""
    mine = [record for record in records if (record["data"], record["length"]) == (name, length)]
    tokens = sum(record["tokens"] for record in mine)
    if not tokens:
        return {"loss": math.nan, "bits": math.nan, "tokens": 0}
    loss = math.fsum(record["loss_sum"] for record in mine) / tokens
    share = sum(record["document_tokens"] for record in mine) / sum(record["document_bytes"] for record in mine)
    return {"loss": loss, "bits": loss / math.log(2) * share, "tokens": tokens}
