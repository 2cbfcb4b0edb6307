"""Perplexity by length: sliding windows over long documents, with the loss at every position of a window.

`equitape.tasks.perplexity` has the protocol: which windows there are and which of their predictions count. Every length
scores the same tokens, so that lengths differ in context alone. A unit is some windows of one document at one length.
"""

import math
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch

from ..data.text import read_documents, short_names
from ..data.tokens import TokenStore, build_tokens
from ..registry import counted
from ..runs.results import BITS_PER_BYTE, PERPLEXITY, Curve, Report
from ..settings import OrOne, Positive, Settings
from .evaluated_model import EvaluatedModel
from .evaluation import Advance, EvaluationTask, Record, Unit
from .perplexity import ScoreRule, cut_windows, score_windows, spread_spans
from .prompt_lengths import split_by_context

SHORTEST, LONGEST = 256, 65536
CURVE_POINTS = 64
MOST_BATCH_TOKENS = 131072
"""Longer batches are not faster."""
UNIT_TOKENS = 16384
"""Maximum tokens of a unit's windows, or one window; an interruption loses at most one unit."""
RESAMPLES = 1000
"""Number of resamplings of documents for intervals."""


@dataclass(frozen=True, kw_only=True)
class PerplexityOptions(Settings):
    """Options of perplexity by length."""

    data: str | tuple[str, ...] | dict[str, str] = field(default_factory=dict)
    """Text to score: a file, a folder, an archive, a list of them, or several by name: {books: PATH}."""
    lengths: Annotated[tuple[Positive, ...], OrOne] = ()
    """Window lengths in tokens; default: powers of two from 256 to twice the model's context, as the text allows."""
    short: Positive = SHORTEST
    """A short length that is always measured too."""
    stride: Positive | None = None
    """Tokens between the starts of windows; default: the length. LongLoRA uses 256."""
    score: ScoreRule = "new"
    """Scored predictions: "new", those of no earlier window; or "all", as in LongLoRA's code."""
    windows: Positive | None = None
    """Score only so many pieces per document, spread evenly, each as long as the longest length; default: everything.
    Every length scores the same pieces."""
    join: bool = False
    """Read all documents of a text as one, joined by end tokens."""

    def __post_init__(self) -> None:
        shortest = min((*self.lengths, self.short))
        if self.stride is not None and self.stride > shortest:
            raise ValueError(
                f"Task 'perplexity': the stride must be from 1 to the shortest length, {shortest}, or tokens are left "
                f"out; it is {self.stride}."
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
    metrics = (PERPLEXITY, BITS_PER_BYTE)
    higher_is_better = False

    def check_data(self) -> None:
        if not self.options.sources:
            raise ValueError(
                "Task 'perplexity' has no text. Set its option data to a file, a folder or a place inside an archive, "
                "for example data=books.tar.xz/books/test, to several by name, for example "
                "data={books: PATH, proofs: PATH}, or to the chapters that come with equitape, data=shipped:valid."
            )
        for source in self.options.sources.values():
            read_documents(source)

    def prepare(self, evaluated: EvaluatedModel) -> list[Unit]:
        options = self.options
        self.check_data()
        self.stores = {name: build_tokens(source, evaluated.tokenizer) for name, source in options.sources.items()}
        self.documents = {name: self.read(store) for name, store in self.stores.items()}
        self.lengths = lengths = self.choose_lengths(evaluated.context)
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
                    units += self.make_units(place, len(self.cut(len(documents[number][0]), length)))
        return units

    def make_units(self, place: dict[str, Any], windows: int) -> list[Unit]:
        """The units of a document at a length, with at most UNIT_TOKENS each."""
        length, key = place["length"], f"{place['data']}/{place['length']}/{place['document']}"
        step = max(1, UNIT_TOKENS // length)
        parts = [(first, min(first + step, windows)) for first in range(0, windows, step)]
        return [
            Unit(
                key=key if len(parts) == 1 else f"{key}/{first}",
                length=length,
                rows=last - first,
                content={**place, "windows": [first, last]},
            )
            for first, last in parts
        ]

    def identity(self) -> dict[str, Any]:
        digests = {name: store.facts.digest for name, store in self.stores.items()}
        return {"lengths": list(self.lengths), "data": digests}

    def read(self, store: TokenStore) -> list[tuple[torch.Tensor, int]]:
        """Tokens and bytes of each document; end tokens are scored only if documents are joined."""
        if self.options.join:
            return [(store.joined(), int(store.num_bytes.sum()))]
        return [(store.document(number, end=False), int(store.num_bytes[number])) for number in range(len(store))]

    def choose_lengths(self, context: int | None) -> tuple[int, ...]:
        """The given lengths, or all that the text allows."""
        given = self.options.lengths
        if not given:
            longest = min(max(len(tokens) for tokens, _ in documents) for documents in self.documents.values()) - 1
            limit = min(2 * (context or LONGEST), longest, LONGEST)
            given = tuple(SHORTEST * 2**power for power in range(9) if SHORTEST * 2**power <= limit)
        return tuple(sorted({*given, self.options.short}))

    def cut(self, tokens: int, length: int) -> list[Any]:
        """The windows of a document. With `windows`, they score the same pieces at every length."""
        options = self.options
        spans = spread_spans(tokens, self.lengths[-1], options.windows)
        return cut_windows(0, tokens, length, options.stride or length, options.score, spans=spans)

    def answer(self, evaluated: EvaluatedModel, units: list[Unit], batch_tokens: int, advance: Advance) -> list[Record]:
        return [self.score(evaluated, unit, min(batch_tokens, MOST_BATCH_TOKENS), advance) for unit in units]

    def score(self, evaluated: EvaluatedModel, unit: Unit, batch_tokens: int, advance: Advance) -> Record:
        """Some windows of a document at one length: sums, which add up over units and documents."""
        place = dict(unit.content)
        first, last = place.pop("windows")
        tokens, num_bytes = self.documents[place["data"]][place["document"]]
        evaluated.check_table(unit.length)
        done = 0

        def progress(count: int, of: int) -> None:
            nonlocal done
            advance(unit.cost * (count - done) / of)
            done = count

        windows = self.cut(len(tokens), unit.length)[first:last]
        sums, counts = score_windows(
            evaluated.model, [tokens], windows, unit.length, batch_tokens=batch_tokens, progress=progress
        )
        return {
            **place,
            "loss_sum": float(sums.sum()),
            "tokens": int(counts.sum()),
            "windows": len(windows),
            "document_tokens": len(tokens),
            "document_bytes": num_bytes,
            **curve_sums(sums, counts),
        }

    def report(self, records: list[Record], facts: dict[str, Any]) -> Report:
        names = list(dict.fromkeys(record["data"] for record in records))
        lengths = sorted({record["length"] for record in records})
        # also where the model failed at it
        piece = facts["examples"]["lengths"][-1]
        context = facts["model"]["context"]
        metrics: dict[str, float] = {}
        intervals: dict[str, list[float]] = {}
        short: dict[str, float] = {}
        curves, notes = [], []
        for name in names:
            suffix = f"_{name}" if len(names) > 1 else ""
            mine = {
                length: [record for record in records if (record["data"], record["length"]) == (name, length)]
                for length in lengths
            }
            totals = {length: total(of_length) for length, of_length in mine.items()}
            values = {length: exp(sums["loss"]) for length, sums in totals.items()}
            inside = split_by_context(lengths, context).get("inside", [])
            longest = (inside or lengths)[-1]
            # the headline: the model's full context
            metrics[f"perplexity{suffix}"] = values[longest]
            metrics |= {f"perplexity{suffix}_{length}": value for length, value in values.items()}
            known = {length: found for length in lengths if (found := interval(mine[length]))}
            intervals |= {f"perplexity{suffix}_{length}": found for length, found in known.items()}
            if longest in known:
                intervals[f"perplexity{suffix}"] = known[longest]
            every = list(known) == lengths
            metrics |= {f"bits_per_byte{suffix}_{length}": sums["bits"] for length, sums in totals.items()}
            short[f"perplexity{suffix}_{self.options.short}"] = values.get(self.options.short, math.nan)
            curves.append(
                Curve(
                    title=f"Perplexity of {name} against length",
                    x_label="tokens of the window",
                    x=[float(length) for length in lengths],
                    y_label=f"perplexity of {describe_count(totals)}",
                    y=list(values.values()),
                    low=[low for low, _ in known.values()] if every else None,
                    high=[high for _, high in known.values()] if every else None,
                )
            )
            places, losses = join_curves(mine[lengths[-1]])
            curves.append(
                Curve(
                    title=f"Loss of {name} against place, windows of {lengths[-1]}",
                    x_label="tokens before the predicted one",
                    x=places,
                    y_label="nats per token",
                    y=losses,
                )
            )
            if lost := [length for length in lengths if has_lost_losses(mine[length])]:
                listed = ", ".join(map(str, lost))
                notes.append(
                    f"{name}: the losses of the model are NaN or infinite at length {listed}; check its weights."
                )
            used = {record["document"]: record for record in records if record["data"] == name}
            notes.append(
                f"{name}: {len(used)} of {next(iter(used.values()))['of']} documents, those with more than "
                f"{piece} tokens, at every length. Scored: {describe_count(totals)}."
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
                + (
                    f" Per document at most {counted(self.options.windows, 'piece')} of {piece} tokens are "
                    f"scored, spread evenly, the same at every length."
                    if self.options.windows
                    else ""
                ),
                f"The headline is at {longest} tokens{describe_headline(context, bool(inside))}.",
            ],
            metrics=metrics,
            short=short,
            notes=notes,
            curves=curves,
            intervals=intervals,
        )


def exp(loss: float) -> float:
    """Perplexity of a loss, capped at the largest float; NaN for NaN."""
    return math.nan if math.isnan(loss) else math.exp(min(loss, 700.0))


def describe_headline(context: int | None, inside: bool) -> str:
    """Why the headline is at that length."""
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


def curve_sums(sums: torch.Tensor, counts: torch.Tensor) -> dict[str, list[float]]:
    """Losses by position in the window, [N], as sums over bins, with the number of predictions in each."""
    runs = torch.arange(len(sums)).tensor_split(min(CURVE_POINTS, len(sums)))
    return {
        "curve_places": [float(run.double().mean()) + 1 for run in runs],
        "curve_sums": [float(sums[run].sum()) for run in runs],
        "curve_counts": [float(counts[run].sum()) for run in runs],
    }


def join_curves(records: list[Record]) -> tuple[list[float], list[float]]:
    """(positions, mean losses) over documents; bins without predictions are left out."""
    if any(value is None for record in records for value in record["curve_sums"]):
        return [], []
    sums = [math.fsum(column) for column in zip(*(record["curve_sums"] for record in records), strict=True)]
    counts = [math.fsum(column) for column in zip(*(record["curve_counts"] for record in records), strict=True)]
    kept = [(place, s / n) for place, s, n in zip(records[0]["curve_places"], sums, counts, strict=True) if n]
    return [place for place, _ in kept], [loss for _, loss in kept]


def total(records: list[Record]) -> dict[str, float]:
    """Loss in nats per token, bits per byte and predictions of the records of a text at a length."""
    tokens = sum(record["tokens"] for record in records)
    if not tokens or has_lost_losses(records):
        return {"loss": math.nan, "bits": math.nan, "tokens": tokens}
    loss = math.fsum(record["loss_sum"] for record in records) / tokens
    documents = {record["document"]: record for record in records}.values()
    share = sum(record["document_tokens"] for record in documents) / sum(r["document_bytes"] for r in documents)
    return {"loss": loss, "bits": loss / math.log(2) * share, "tokens": tokens}


def has_lost_losses(records: list[Record]) -> bool:
    """Whether losses were NaN or infinite; files hold null for them."""
    return any(record["loss_sum"] is None for record in records)


def interval(records: list[Record]) -> list[float]:
    """The 95 % interval of perplexity over documents, by resampling them; empty for one document or NaN losses."""
    sums: dict[int, list[float]] = {}
    if has_lost_losses(records):
        return []
    for record in records:
        loss, tokens = sums.get(record["document"], [0.0, 0.0])
        sums[record["document"]] = [loss + record["loss_sum"], tokens + record["tokens"]]
    if len(sums) < 2:
        return []
    table = torch.tensor(list(sums.values()), dtype=torch.float64)
    drawn = torch.randint(len(table), (RESAMPLES, len(table)), generator=torch.Generator().manual_seed(0))
    resampled = table[drawn].sum(1)
    bounds = (resampled[:, 0] / resampled[:, 1]).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64))
    return bounds.clamp(max=700.0).exp().tolist()


def describe_count(totals: dict[int, dict[str, float]]) -> str:
    """Number of scored predictions: one number for all lengths, or one per length."""
    counts = {length: int(sums["tokens"]) for length, sums in totals.items()}
    if len(set(counts.values())) == 1:
        return f"the same {next(iter(counts.values())):,} tokens at every length"
    return ", ".join(f"{count:,} tokens at length {length}" for length, count in counts.items())
