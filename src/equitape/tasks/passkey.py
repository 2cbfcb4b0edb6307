"""Passkey retrieval (Mohtashami and Jaggi, arXiv 2305.16300): five digits hidden in filler, asked for at the end.

Every cell is a length of the prompt and a depth of the key. Keys are random numbers of five digits, the same in every
run with the same seed. An answer is right when the first digits it writes are the key and nothing but the key.
"""

import re
from dataclasses import dataclass
from random import Random
from typing import Any

from ..runs.results import EXACT_MATCH, HeatMap
from .decoding import write_answers
from .evaluated_model import EvaluatedModel
from .evaluation import Advance, Record, Report, Unit, mean
from .haystack import Hidden
from .haystack_task import HaystackOptions, HaystackTask, Place
from .prompt_lengths import split_by_context

OPENING = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it. I will quiz you about "
    "the important information there.\n"
)
KEY = "The pass key is {key}. Remember it. {key} is the pass key.\n"
QUESTION = "What is the pass key? The pass key is"
SPARE_TOKENS = 3
"""Beyond those of a key: to see where the number ends."""
DEPTHS = tuple(round(index / 9, 3) for index in range(10))


@dataclass(frozen=True, kw_only=True)
class PasskeyOptions(HaystackOptions):
    """Options of passkey retrieval."""

    depths: tuple[float, ...] = DEPTHS
    """Where keys are hidden, from 0, the beginning, to 1, the end."""
    task = "passkey"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.depths or not all(isinstance(depth, (int, float)) and 0 <= depth <= 1 for depth in self.depths):
            raise ValueError(f"Task 'passkey': depths is {list(self.depths)}; give numbers from 0 to 1.")


class Passkey(HaystackTask):
    """Find five digits in filler."""

    name = "passkey"
    idea = "five random digits hidden in filler, by length and depth; exact match by generation"
    options_class = PasskeyOptions
    options: PasskeyOptions
    headline = "exact_match"
    metrics = (EXACT_MATCH,)

    def prepare(self, evaluated: EvaluatedModel) -> list[Unit]:
        units = super().prepare(evaluated)
        keys = [f" {self.draw_key(unit.content)}" for unit in units]
        self.answer_tokens = max(map(len, self.maker.encode.all(keys))) + SPARE_TOKENS
        return units

    def places(self, length: int) -> list[Place]:
        return [
            {"length": length, "depth": float(depth), "sample": sample}
            for depth in self.options.depths
            for sample in range(self.options.samples)
        ]

    def draw_key(self, place: Place) -> int:
        """The key of a prompt."""
        return self.random(place).randint(10000, 99999)

    def random(self, place: Place) -> Random:
        """Random numbers that depend on the seed and the place alone."""
        return Random(f"passkey {self.options.seed} {place['length']} {place['depth']} {place['sample']}")

    def build(self, place: Place, length: int) -> list[int]:
        random = self.random(place)
        key = random.randint(10000, 99999)
        hidden = [Hidden(text=KEY.format(key=key), depth=place["depth"])]
        return self.maker.build(length, OPENING, hidden, QUESTION, random)

    def answer(self, evaluated: EvaluatedModel, units: list[Unit], batch_tokens: int, advance: Advance) -> list[Record]:
        answers = write_answers(evaluated, [self.make(unit.content) for unit in units], self.answer_tokens)
        advance(sum(unit.cost for unit in units))
        return [
            {**unit.content, "expected": str(self.draw_key(unit.content)), "answer": answer.text}
            for unit, answer in zip(units, answers, strict=True)
        ]

    def report(self, records: list[Record], facts: dict[str, Any]) -> Report:
        scores: dict[tuple[int, float], list[bool]] = {}
        for record in records:
            cell = scores.setdefault((record["length"], record["depth"]), [])
            cell.append(first_number(record["answer"]) == record["expected"])
        lengths = sorted({length for length, _ in scores})
        depths = sorted({depth for _, depth in scores})
        by_length = {
            length: 100 * mean(score for depth in depths for score in scores.get((length, depth), []))
            for length in lengths
        }
        context = facts["model"]["context"]
        metrics = {"exact_match": mean(by_length.values())}
        metrics |= {f"exact_match_{length}": value for length, value in by_length.items()}
        for where, kept in split_by_context(lengths, context).items():
            metrics[f"exact_match_{where}"] = mean(by_length[length] for length in kept)
        grid = HeatMap(
            title="Passkey, exact match in per cent",
            row_label="depth",
            rows=[f"{depth:g}" for depth in depths],
            column_label="tokens of the prompt",
            columns=[str(length) for length in lengths],
            values=[[100 * mean(scores.get((length, depth), [])) for length in lengths] for depth in depths],
        )
        return Report(
            protocol=[
                f"Prompts have exactly the stated number of tokens; the answer comes after them. "
                f"{self.options.samples} prompts per cell of {len(lengths)} lengths and {len(depths)} depths, filler: "
                f"{self.options.filler}, seed {self.options.seed}.",
                "Answers come from greedy decoding with the cache. An answer is right if its first number is the key.",
                f"The model is meant for {context} tokens." if context else "The model states no context.",
            ],
            metrics=metrics,
            grids=[grid],
            **self.short_figures(by_length, facts),
        )


def first_number(text: str) -> str:
    """The first run of digits."""
    found = re.search(r"\d+", text)
    return found.group() if found else ""
