"""Passkey retrieval and needles in a haystack: prompts of exact length with something hidden in filler.

`needle_kinds.py` makes the prompts. passkey (Mohtashami and Jaggi, arXiv 2305.16300) hides five digits; every cell is a
length and a depth, and an answer is right if its first number is the key. needles has six kinds in the manner of RULER;
the score is the share of the references that the answer contains, ignoring case. Seeds decide what is hidden and where.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Annotated, Any, ClassVar, Literal, get_args

from ..data.text import read_documents
from ..registry import counted
from ..runs.results import EXACT_MATCH, PERCENT, HeatMap, Metric, Report
from ..settings import Ge, Le, Len, OrOne, Settings, Share
from .decoding import write_answers
from .evaluated_model import EvaluatedModel
from .evaluation import Advance, EvaluationTask, Record, Unit, mean
from .haystack import NOISE, PromptMaker
from .needle_kinds import KINDS, Example, passkey
from .prompt_lengths import SHORT, choose_lengths, describe_short, measure, split_by_context
from .text_metrics import contained_share

DEPTHS = tuple(round(index / 9, 3) for index in range(10))
DEPTH_BANDS = 5
PromptTokens = Annotated[int, Ge(1), Le(10**8)]
Samples = Annotated[int, Ge(1), Le(10**6)]

Place = dict[str, Any]
"""The values that identify a prompt, including its "length"; joined, they name its unit."""


@dataclass(frozen=True, kw_only=True)
class HaystackOptions(Settings):
    """Options of both tasks."""

    lengths: Annotated[tuple[PromptTokens, ...], OrOne] = ()
    """Tokens of the prompts; default: from an eighth of the model's context to twice the context."""
    short: PromptTokens | None = None
    """A short length that is always measured too; default: 512, or what the tokenizer needs."""
    samples: Samples = 10
    """Prompts per cell."""
    filler: str = NOISE
    """"noise", or text to hide things in: a file, a folder or an archive."""
    seed: int = 0
    """Seed of what is hidden and where."""


class HaystackTask(EvaluationTask):
    """The base of both tasks. Subclasses list the prompts of a length, make them and score the answers."""

    options: HaystackOptions
    answer_tokens: ClassVar[tuple[int, int]]
    """(a, b): an answer may take a times the tokens of the expected one, and b more."""

    def places(self, length: int) -> list[Place]:
        """All prompts of a length."""
        raise NotImplementedError

    def build(self, place: Place, length: int) -> Example:
        """The prompt of a place. `length`, its number of tokens, affects only the filler."""
        raise NotImplementedError

    def describe(self, place: Place) -> str:
        """Name of a prompt in error messages, after the task's name."""
        return ""

    def record(self, place: Place, example: Example, answer: str) -> Record:
        """The record of an answer."""
        raise NotImplementedError

    def score(self, record: Record) -> float:
        """The score of a record, from 0 to 1."""
        raise NotImplementedError

    def check_data(self) -> None:
        if self.options.filler != NOISE:
            read_documents(self.options.filler)

    def prepare(self, evaluated: EvaluatedModel) -> list[Unit]:
        options = self.options
        self.maker = PromptMaker(evaluated.tokenizer, options.filler)
        self.lengths = choose_lengths(options.lengths, options.short, evaluated.context, self.need, self.name)
        return [
            Unit(key="/".join(map(str, place.values())), length=length, content=place)
            for length in self.lengths.all
            for place in self.places(length)
        ]

    def make(self, place: Place) -> Example:
        """The prompt of a place."""
        return self.build(place, place["length"])

    def need(self, length: int) -> tuple[int, str]:
        """Tokens of the largest prompt of a length without filler, and its name."""
        return max((measure(partial(self.build, place, 0)), self.describe(place)) for place in self.places(length))

    def settled_options(self) -> dict[str, Any]:
        return {**self.options.to_dict(), "short": self.lengths.short}

    def identity(self) -> dict[str, Any]:
        raised = {"short_raised": True} if self.lengths.raised else {}
        return {"lengths": list(self.lengths.all), "filler": self.maker.filler.digest, **raised}

    def answer(self, evaluated: EvaluatedModel, units: list[Unit], batch_tokens: int, advance: Advance) -> list[Record]:
        records: dict[str, Record] = {}
        # one kind per batch, since a batch runs until its longest answer ends
        for kind in dict.fromkeys(unit.content.get("kind") for unit in units):
            same = [unit for unit in units if unit.content.get("kind") == kind]
            examples = [self.make(unit.content) for unit in same]
            expected = self.maker.encode.all([" " + ", ".join(example.references) for example in examples])
            times, spare = self.answer_tokens
            limits = [times * len(tokens) + spare for tokens in expected]
            answers = write_answers(evaluated, [example.tokens for example in examples], limits)
            advance(sum(unit.cost for unit in same))
            for unit, example, answer in zip(same, examples, answers, strict=True):
                records[unit.key] = self.record(unit.content, example, answer.text)
        return [records[unit.key] for unit in units]

    def summarise(
        self, records: list[Record], facts: dict[str, Any], kinds: list[str]
    ) -> tuple[dict[str, Any], Callable[..., HeatMap]]:
        """Metrics of a report, each the mean over kinds, and a function that makes heat maps by length."""
        scored = [(record, self.score(record)) for record in records]
        lengths = sorted({record["length"] for record in records})

        def percent(length: int, keep: Callable[[Record], bool]) -> float:
            return 100 * mean(value for record, value in scored if record["length"] == length and keep(record))

        def grid(title: str, row_label: str, rows: dict[str, Callable[[Record], bool]]) -> HeatMap:
            return HeatMap(
                title=title,
                row_label=row_label,
                rows=list(rows),
                column_label="tokens of the prompt",
                columns=[str(length) for length in lengths],
                values=[[percent(length, keep) for length in lengths] for keep in rows.values()],
            )

        table = {kind: {length: percent(length, is_kind(kind)) for length in lengths} for kind in kinds}
        by_length = {length: mean(table[kind][length] for kind in kinds) for length in lengths}
        metrics = {self.headline: mean(by_length.values())}
        metrics |= {f"{self.headline}_{length}": value for length, value in by_length.items()}
        for where, kept in split_by_context(lengths, facts["model"]["context"]).items():
            metrics[f"{self.headline}_{where}"] = mean(by_length[length] for length in kept)
        if len(self.metrics) > 1:
            metrics |= {f"{kind}_{length}": table[kind][length] for kind in kinds for length in lengths}
        short = self.options.short or SHORT
        figures = {
            "metrics": metrics,
            "short": {f"{self.headline}_{short}": by_length.get(short, float("nan"))},
            "notes": describe_short(facts["examples"], short),
        }
        return figures, grid


def is_kind(kind: str) -> Callable[[Record], bool]:
    """Whether a record is of a kind; passkey records have no kind."""
    return lambda record: record.get("kind", kind) == kind


@dataclass(frozen=True, kw_only=True)
class PasskeyOptions(HaystackOptions):
    """Options of passkey retrieval."""

    depths: Annotated[tuple[Share, ...], Len(1), OrOne] = DEPTHS
    """Depths of the keys, from 0 (start) to 1 (end)."""


class Passkey(HaystackTask):
    """Find five digits in filler."""

    name = "passkey"
    idea = "five random digits hidden in filler, by length and depth; exact match by generation"
    options_class = PasskeyOptions
    options: PasskeyOptions
    headline = "exact_match"
    metrics = (EXACT_MATCH,)
    # three more, to detect the end of the number
    answer_tokens = (1, 3)

    def places(self, length: int) -> list[Place]:
        return [
            {"length": length, "depth": depth, "sample": sample}
            # each once: places name units
            for depth in dict.fromkeys(map(float, self.options.depths))
            for sample in range(self.options.samples)
        ]

    def build(self, place: Place, length: int) -> Example:
        random = Random(f"passkey {self.options.seed} {place['length']} {place['depth']} {place['sample']}")
        return passkey(self.maker, length, place["depth"], random)

    def record(self, place: Place, example: Example, answer: str) -> Record:
        return {**place, "expected": example.references[0], "answer": answer}

    def score(self, record: Record) -> float:
        return first_number(record["answer"]) == record["expected"]

    def report(self, records: list[Record], facts: dict[str, Any]) -> Report:
        figures, grid = self.summarise(records, facts, [self.name])
        depths = sorted({record["depth"] for record in records})
        rows = {f"{depth:g}": partial(has_depth, depth, depth) for depth in depths}
        shown = grid("Passkey, exact match in per cent", "depth", rows)
        context = facts["model"]["context"]
        return Report(
            protocol=[
                f"Prompts have exactly the stated number of tokens; the answer comes after them. "
                f"{counted(self.options.samples, 'prompt')} per cell of {counted(len(shown.columns), 'length')} and "
                f"{counted(len(depths), 'depth')}, filler: {self.options.filler}, seed {self.options.seed}.",
                "Answers come from greedy decoding with the cache. An answer is right if its first number is the key.",
                f"The model is meant for {context} tokens." if context else "The model states no context.",
            ],
            grids=[shown],
            **figures,
        )


def has_depth(low: float, high: float, record: Record) -> bool:
    """Whether the needle's depth is from `low` to below `high`, or equal to both if they are the same."""
    return record["depth"] is not None and (low <= record["depth"] < high or record["depth"] == low == high)


def first_number(text: str) -> str:
    """The first run of digits."""
    found = re.search(r"\d+", text)
    return found.group() if found else ""


NeedleKind = Literal["single", "multikey", "multivalue", "multiquery", "variables", "common_words"]


@dataclass(frozen=True, kw_only=True)
class NeedlesOptions(HaystackOptions):
    """Options of the needles."""

    kinds: Annotated[tuple[NeedleKind, ...], Len(1), OrOne] = get_args(NeedleKind)
    """Kinds of needles."""
    samples: Samples = 20
    """Prompts per kind and length."""


class Needles(HaystackTask):
    """Find what is hidden in filler."""

    name = "needles"
    idea = "RULER-like: single, multikey, multivalue and multiquery needles, variable tracking, common words"
    options_class = NeedlesOptions
    options: NeedlesOptions
    headline = "score"
    metrics = tuple(Metric(name=name, higher_is_better=True, unit=PERCENT) for name in ("score", *KINDS))
    # RULER allows 128 tokens (30 for variables); twice the answer leaves room for other words
    answer_tokens = (2, 16)

    def places(self, length: int) -> list[Place]:
        return [
            {"kind": kind, "length": length, "sample": sample}
            for kind in dict.fromkeys(self.options.kinds)
            for sample in range(self.options.samples)
        ]

    def describe(self, place: Place) -> str:
        return f", kind {place['kind']!r}"

    def build(self, place: Place, length: int) -> Example:
        """Single needles are spread evenly over all depths."""
        random = Random(f"needles {self.options.seed} {place['kind']} {place['length']} {place['sample']}")
        depth = (place["sample"] + random.random()) / self.options.samples
        return KINDS[place["kind"]](self.maker, length, min(depth, 1.0), random)

    def record(self, place: Place, example: Example, answer: str) -> Record:
        return {**place, "depth": example.depth, "references": example.references, "answer": answer}

    def score(self, record: Record) -> float:
        return contained_share(record["answer"], record["references"])

    def report(self, records: list[Record], facts: dict[str, Any]) -> Report:
        kinds = [kind for kind in KINDS if any(record["kind"] == kind for record in records)]
        figures, grid = self.summarise(records, facts, kinds)
        grids = [grid("Needles by kind, per cent", "kind", {kind: is_kind(kind) for kind in kinds})]
        bands = [(band / DEPTH_BANDS, (band + 1) / DEPTH_BANDS) for band in range(DEPTH_BANDS)]
        for kind in ("single", "multikey"):
            if kind in kinds:
                rows = {f"{low:g} to {high:g}": partial(in_band, kind, low, high) for low, high in bands}
                grids.append(grid(f"Needles, {kind}, per cent", "depth", rows))
        return Report(
            protocol=[
                f"{counted(self.options.samples, 'prompt')} per kind and length, with exactly the stated tokens, "
                f"filler: {self.options.filler}, seed {self.options.seed}; answers by greedy decoding with the cache.",
                "The score is RULER's: the share of the references that the answer contains, ignoring case, in "
                "per cent.",
            ],
            grids=grids,
            **figures,
        )


def in_band(kind: str, low: float, high: float, record: Record) -> bool:
    """Whether a record has a kind and a depth in a band; the last band includes its end."""
    return record["kind"] == kind and has_depth(low, high if high < 1 else 2.0, record)
