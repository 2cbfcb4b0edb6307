"""Needles in a haystack, six kinds in the manner of RULER, made offline from a seed; `needle_kinds.py` has the prompts.

A score is RULER's: the share of the references that the answer contains, capitals not minded.
"""

from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

from ..registry import describe_choices
from ..settings import Settings
from .base import Advance, EvaluationTask, Grid, Record, Report, Unit, check_lengths, mean
from .generate import write_answers
from .lengths import SHORT, choose_lengths, describe_short, measure, split_by_context
from .metrics import contained_share
from .needle_kinds import KINDS, Example
from .prompts import NOISE, PromptMaker
from .subject import Subject

SPARE_TOKENS = 16
DEPTH_BANDS = 5


@dataclass(frozen=True, kw_only=True)
class NeedlesOptions(Settings):
    """Options of the needles."""

    kinds: tuple[str, ...] = tuple(KINDS)
    """Which kinds."""
    lengths: tuple[int, ...] = ()
    """Tokens of the prompts; from an eighth of the model's context to twice of it when left out."""
    short: int | None = None
    """A short length that is always measured too; 512, or what the tokenizer needs, when left out."""
    samples: int = 20
    """Prompts of each kind and length."""
    filler: str = NOISE
    """"noise", or text to hide needles in: a file, a folder or an archive."""
    seed: int = 0
    """Of needles and of where they are hidden."""

    def __post_init__(self) -> None:
        check_lengths((*self.lengths, *([] if self.short is None else [self.short])), "needles")
        if self.samples < 1:
            raise ValueError(f"Task 'needles': samples is {self.samples}; it must be 1 or more.")
        if not self.kinds:
            raise ValueError(f"Task 'needles': kinds is empty; name some of {', '.join(KINDS)}.")
        for kind in self.kinds:
            if kind not in KINDS:
                raise ValueError(f"Task 'needles': there is no kind {kind!r}.{describe_choices(kind, KINDS)}")


class Needles(EvaluationTask):
    """Find what is hidden in filler."""

    name = "needles"
    idea = "RULER-like: single, multikey, multivalue and multiquery needles, variable tracking, common words"
    options_class = NeedlesOptions
    options: NeedlesOptions
    headline = "score"

    def prepare(self, subject: Subject) -> list[Unit]:
        options = self.options
        self.maker = PromptMaker(subject.tokenizer, options.filler)
        self.lengths = choose_lengths(options.lengths, options.short, subject.context, self.need, self.name)
        return [
            Unit(
                key=f"{kind}/{length}/{sample}",
                length=length,
                content={"kind": kind, "length": length, "sample": sample},
            )
            for kind in options.kinds
            for length in self.lengths.all
            for sample in range(options.samples)
        ]

    def need(self, length: int) -> tuple[int, str]:
        """What the largest prompt of a length takes without filler, and its kind."""
        needed = [
            (measure(partial(self.make, {"kind": kind, "length": length, "sample": sample}, 0)), f", kind {kind!r}")
            for kind in self.options.kinds
            for sample in range(self.options.samples)
        ]
        return max(needed)

    def make(self, place: dict[str, Any], length: int | None = None) -> Example:
        """The prompt of a kind, a length and a number. Single things asked for lie evenly over all depths.

        length: another one than the place's changes nothing but the filler.
        """
        random = Random(f"needles {self.options.seed} {place['kind']} {place['length']} {place['sample']}")
        depth = (place["sample"] + random.random()) / self.options.samples
        return KINDS[place["kind"]](self.maker, place["length"] if length is None else length, min(depth, 1.0), random)

    def settled_options(self) -> dict[str, Any]:
        return {**self.options.to_dict(), "short": self.lengths.short}

    def identity(self) -> dict[str, Any]:
        raised = {"short_raised": True} if self.lengths.raised else {}
        return {"lengths": list(self.lengths.all), "filler": self.maker.filler.digest, **raised}

    def answer(self, subject: Subject, units: list[Unit], batch_tokens: int, advance: Advance) -> list[Record]:
        records = []
        # kinds apart, since a batch writes until its longest answer is done
        for kind in dict.fromkeys(unit.content["kind"] for unit in units):
            same = [unit for unit in units if unit.content["kind"] == kind]
            examples = [self.make(unit.content) for unit in same]
            expected = [" " + ", ".join(example.references) for example in examples]
            # RULER allows 128 tokens (30 for variables); twice what the answer takes leaves room for other words
            tokens = 2 * max(map(len, self.maker.encode.all(expected))) + SPARE_TOKENS
            answers = write_answers(subject, [example.tokens for example in examples], tokens)
            advance(sum(unit.cost for unit in same))
            records += [
                {**unit.content, "depth": example.depth, "references": example.references, "answer": answer.text}
                for unit, example, answer in zip(same, examples, answers, strict=True)
            ]
        order = {(unit.content["kind"], unit.content["sample"], unit.length): n for n, unit in enumerate(units)}
        return sorted(records, key=lambda record: order[record["kind"], record["sample"], record["length"]])

    def report(self, records: list[Record], facts: dict[str, Any]) -> Report:
        scored = [(record, contained_share(record["answer"], record["references"])) for record in records]
        lengths = sorted({record["length"] for record in records})
        kinds = [kind for kind in KINDS if any(record["kind"] == kind for record in records)]

        def score(kind: str, length: int, low: float = 0.0, high: float = 2.0) -> float:
            return 100 * mean(
                value
                for record, value in scored
                if (record["kind"], record["length"]) == (kind, length)
                and (record["depth"] is None or low <= record["depth"] < high)
            )

        table = {length: {kind: score(kind, length) for kind in kinds} for length in lengths}
        by_length = {length: mean(table[length].values()) for length in lengths}
        metrics = {"score": mean(by_length.values())}
        metrics |= {f"score_{length}": value for length, value in by_length.items()}
        for where, kept in split_by_context(lengths, facts["model"]["context"]).items():
            metrics[f"score_{where}"] = mean(by_length[length] for length in kept)
        metrics |= {f"{kind}_{length}": table[length][kind] for kind in kinds for length in lengths}
        columns = [str(length) for length in lengths]
        grids = [
            Grid(
                title="Needles by kind, per cent",
                row_label="kind",
                rows=kinds,
                column_label="tokens of the prompt",
                columns=columns,
                values=[[table[length][kind] for length in lengths] for kind in kinds],
            )
        ]
        bands = [(band / DEPTH_BANDS, (band + 1) / DEPTH_BANDS) for band in range(DEPTH_BANDS)]
        for kind in ("single", "multikey"):
            if kind in kinds:
                values = [
                    [score(kind, length, low, high if high < 1 else 2.0) for length in lengths] for low, high in bands
                ]
                grids.append(
                    Grid(
                        title=f"Needles, {kind}, per cent",
                        row_label="depth",
                        rows=[f"{low:g} to {high:g}" for low, high in bands],
                        column_label="tokens of the prompt",
                        columns=columns,
                        values=values,
                    )
                )
        short = self.options.short or SHORT
        return Report(
            protocol=[
                f"{self.options.samples} prompts of each kind and length, of exactly the tokens stated, filler: "
                f"{self.options.filler}, seed {self.options.seed}; answers by greedy decoding with the cache.",
                "The score is RULER's: the share of the references that the answer contains, capitals not minded, in "
                "per cent.",
            ],
            metrics=metrics,
            short={f"score_{short}": by_length.get(short, float("nan"))},
            notes=describe_short(facts["examples"], short),
            grids=grids,
        )
