"""Passkey retrieval (Mohtashami and Jaggi, arXiv 2305.16300): five digits hidden in filler, asked for at the end.

Every cell is a length of the prompt and a depth of the key. Keys are random numbers of five digits, the same in every
run with the same seed. An answer is right when the first digits it writes are the key and nothing but the key.
"""

import re
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

from ..settings import Settings
from .base import Advance, EvaluationTask, Grid, Record, Report, Unit, check_lengths, mean
from .generate import write_answers
from .lengths import SHORT, choose_lengths, describe_short, measure, split_by_context
from .prompts import NOISE, Hidden, PromptMaker
from .subject import Subject

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
class PasskeyOptions(Settings):
    """Options of passkey retrieval."""

    lengths: tuple[int, ...] = ()
    """Tokens of the prompts; from an eighth of the model's context to twice of it when left out."""
    short: int | None = None
    """A short length that is always measured too; 512, or what the tokenizer needs, when left out."""
    depths: tuple[float, ...] = DEPTHS
    """Where keys are hidden, from 0, the beginning, to 1, the end."""
    samples: int = 10
    """Prompts in each cell."""
    filler: str = NOISE
    """"noise", or text to hide keys in: a file, a folder or an archive."""
    seed: int = 0
    """Of keys, and of where in the filler prompts begin."""

    def __post_init__(self) -> None:
        check_lengths((*self.lengths, *([] if self.short is None else [self.short])), "passkey")
        if self.samples < 1:
            raise ValueError(f"Task 'passkey': samples is {self.samples}; it must be 1 or more.")
        if not self.depths or not all(isinstance(depth, (int, float)) and 0 <= depth <= 1 for depth in self.depths):
            raise ValueError(f"Task 'passkey': depths is {list(self.depths)}; give numbers from 0 to 1.")


class Passkey(EvaluationTask):
    """Find five digits in filler."""

    name = "passkey"
    idea = "five random digits hidden in filler, by length and depth; exact match by generation"
    options_class = PasskeyOptions
    options: PasskeyOptions
    headline = "exact_match"

    def prepare(self, subject: Subject) -> list[Unit]:
        options = self.options
        self.maker = PromptMaker(subject.tokenizer, options.filler)
        self.lengths = choose_lengths(options.lengths, options.short, subject.context, self.need, self.name)
        places = [place for length in self.lengths.all for place in self.places(length)]
        units = [
            Unit(key="/".join(str(value) for value in place.values()), length=place["length"], content=place)
            for place in places
        ]
        keys = [f" {self.draw_key(place)}" for place in places]
        self.answer_tokens = max(map(len, self.maker.encode.all(keys))) + SPARE_TOKENS
        return units

    def places(self, length: int) -> list[dict[str, Any]]:
        """All prompts of a length."""
        return [
            {"length": length, "depth": float(depth), "sample": sample}
            for depth in self.options.depths
            for sample in range(self.options.samples)
        ]

    def need(self, length: int) -> tuple[int, str]:
        """What the largest prompt of a length takes without filler."""
        return max(measure(partial(self.make, place, 0)) for place in self.places(length)), ""

    def draw_key(self, place: dict[str, Any]) -> int:
        """The key of a prompt."""
        return self.random(place).randint(10000, 99999)

    def random(self, place: dict[str, Any]) -> Random:
        """Random numbers that depend on the seed and the place alone."""
        return Random(f"passkey {self.options.seed} {place['length']} {place['depth']} {place['sample']}")

    def make(self, place: dict[str, Any], length: int | None = None) -> list[int]:
        """The tokens of a prompt; another length changes nothing but the filler."""
        random = self.random(place)
        key = random.randint(10000, 99999)
        hidden = [Hidden(text=KEY.format(key=key), depth=place["depth"])]
        return self.maker.build(place["length"] if length is None else length, OPENING, hidden, QUESTION, random)

    def settled_options(self) -> dict[str, Any]:
        return {**self.options.to_dict(), "short": self.lengths.short}

    def identity(self) -> dict[str, Any]:
        raised = {"short_raised": True} if self.lengths.raised else {}
        return {"lengths": list(self.lengths.all), "filler": self.maker.filler.digest, **raised}

    def answer(self, subject: Subject, units: list[Unit], batch_tokens: int, advance: Advance) -> list[Record]:
        answers = write_answers(subject, [self.make(unit.content) for unit in units], self.answer_tokens)
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
        grid = Grid(
            title="Passkey, exact match in per cent",
            row_label="depth",
            rows=[f"{depth:g}" for depth in depths],
            column_label="tokens of the prompt",
            columns=[str(length) for length in lengths],
            values=[[100 * mean(scores.get((length, depth), [])) for length in lengths] for depth in depths],
        )
        short = self.options.short or SHORT
        return Report(
            protocol=[
                f"Prompts have exactly the tokens stated; the answer comes after them. {self.options.samples} prompts "
                f"in each cell of {len(lengths)} lengths and {len(depths)} depths, filler: {self.options.filler}, seed "
                f"{self.options.seed}.",
                "Right is an answer, by greedy decoding with the cache, whose first number is the key.",
                f"The model is meant for {context} tokens." if context else "The model does not say its context.",
            ],
            metrics=metrics,
            short={f"exact_match_{short}": by_length.get(short, float("nan"))},
            notes=describe_short(facts["examples"], short),
            grids=[grid],
        )


def first_number(text: str) -> str:
    """The first run of digits."""
    found = re.search(r"\d+", text)
    return found.group() if found else ""
