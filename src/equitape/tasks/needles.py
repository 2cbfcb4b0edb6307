"""Needles in a haystack, six kinds in the manner of RULER, made offline from a seed; `needle_kinds.py` has the prompts.

A score is RULER's: the share of the references that the answer contains, ignoring case.
"""

from dataclasses import dataclass
from random import Random
from typing import Any

from ..registry import describe_choices
from ..runs.results import PERCENT, HeatMap, Metric
from .decoding import write_answers
from .evaluated_model import EvaluatedModel
from .evaluation import Advance, Record, Report, Unit, mean
from .haystack_task import HaystackOptions, HaystackTask, Place
from .needle_kinds import KINDS, Example
from .prompt_lengths import split_by_context
from .text_metrics import contained_share

SPARE_TOKENS = 16
DEPTH_BANDS = 5


@dataclass(frozen=True, kw_only=True)
class NeedlesOptions(HaystackOptions):
    """Options of the needles."""

    kinds: tuple[str, ...] = tuple(KINDS)
    """Which kinds."""
    samples: int = 20
    """Prompts per kind and length."""
    task = "needles"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.kinds:
            raise ValueError(f"Task 'needles': kinds is empty; name some of {', '.join(KINDS)}.")
        for kind in self.kinds:
            if kind not in KINDS:
                raise ValueError(f"Task 'needles': there is no kind {kind!r}.{describe_choices(kind, KINDS)}")


class Needles(HaystackTask):
    """Find what is hidden in filler."""

    name = "needles"
    idea = "RULER-like: single, multikey, multivalue and multiquery needles, variable tracking, common words"
    options_class = NeedlesOptions
    options: NeedlesOptions
    headline = "score"
    metrics = tuple(Metric(name=name, higher_is_better=True, unit=PERCENT) for name in ("score", *KINDS))

    def places(self, length: int) -> list[Place]:
        return [
            {"kind": kind, "length": length, "sample": sample}
            for kind in self.options.kinds
            for sample in range(self.options.samples)
        ]

    def describe(self, place: Place) -> str:
        return f", kind {place['kind']!r}"

    def build(self, place: Place, length: int) -> Example:
        """A single needle is spread evenly over all depths."""
        random = Random(f"needles {self.options.seed} {place['kind']} {place['length']} {place['sample']}")
        depth = (place["sample"] + random.random()) / self.options.samples
        return KINDS[place["kind"]](self.maker, length, min(depth, 1.0), random)

    def answer(self, evaluated: EvaluatedModel, units: list[Unit], batch_tokens: int, advance: Advance) -> list[Record]:
        records = []
        # kinds apart, since a batch writes until its longest answer is done
        for kind in dict.fromkeys(unit.content["kind"] for unit in units):
            same = [unit for unit in units if unit.content["kind"] == kind]
            examples = [self.make(unit.content) for unit in same]
            expected = [" " + ", ".join(example.references) for example in examples]
            # RULER allows 128 tokens (30 for variables); twice what the answer takes leaves room for other words
            tokens = 2 * max(map(len, self.maker.encode.all(expected))) + SPARE_TOKENS
            answers = write_answers(evaluated, [example.tokens for example in examples], tokens)
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
            HeatMap(
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
                    HeatMap(
                        title=f"Needles, {kind}, per cent",
                        row_label="depth",
                        rows=[f"{low:g} to {high:g}" for low, high in bands],
                        column_label="tokens of the prompt",
                        columns=columns,
                        values=values,
                    )
                )
        return Report(
            protocol=[
                f"{self.options.samples} prompts of each kind and length, of exactly the tokens stated, filler: "
                f"{self.options.filler}, seed {self.options.seed}; answers by greedy decoding with the cache.",
                "The score is RULER's: the share of the references that the answer contains, ignoring case, in "
                "per cent.",
            ],
            metrics=metrics,
            grids=grids,
            **self.short_figures(by_length, facts),
        )
