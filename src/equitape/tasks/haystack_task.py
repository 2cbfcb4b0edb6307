"""The common part of passkey and needles: prompts of exact length with something hidden in filler."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from ..data.text import read_documents
from ..settings import Settings
from .evaluated_model import EvaluatedModel
from .evaluation import EvaluationTask, Unit, check_lengths
from .haystack import NOISE, PromptMaker
from .prompt_lengths import SHORT, choose_lengths, describe_short, measure

Place = dict[str, Any]
"""What tells one prompt from another; its "length" is among it, and the values, joined, name its unit."""


@dataclass(frozen=True, kw_only=True)
class HaystackOptions(Settings):
    """Options of both tasks."""

    lengths: tuple[int, ...] = ()
    """Tokens of the prompts; default: from an eighth of the model's context to twice the context."""
    short: int | None = None
    """A short length that is always measured too; default: 512, or what the tokenizer needs."""
    samples: int = 10
    """Prompts per cell."""
    filler: str = NOISE
    """"noise", or text to hide things in: a file, a folder or an archive."""
    seed: int = 0
    """Decides what is hidden and where."""
    # without an annotation, which would make it look like a setting
    task = ""

    def __post_init__(self) -> None:
        check_lengths((*self.lengths, *([] if self.short is None else [self.short])), self.task)
        if self.samples < 1:
            raise ValueError(f"Task {self.task!r}: samples is {self.samples}; it must be 1 or more.")


class HaystackTask(EvaluationTask):
    """Subclasses list the prompts of a length, make them, have them answered and score the answers."""

    options: HaystackOptions

    def places(self, length: int) -> list[Place]:
        """All prompts of a length."""
        raise NotImplementedError

    def build(self, place: Place, length: int) -> Any:
        """The prompt of a place. `length` is its size in tokens and decides nothing but the filler."""
        raise NotImplementedError

    def describe(self, place: Place) -> str:
        """How error messages call a prompt, beyond the task's name."""
        return ""

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

    def make(self, place: Place) -> Any:
        """The prompt of a place."""
        return self.build(place, place["length"])

    def need(self, length: int) -> tuple[int, str]:
        """Tokens that the largest prompt of a length takes without filler, and how to call that prompt."""
        return max((measure(partial(self.build, place, 0)), self.describe(place)) for place in self.places(length))

    def settled_options(self) -> dict[str, Any]:
        return {**self.options.to_dict(), "short": self.lengths.short}

    def identity(self) -> dict[str, Any]:
        raised = {"short_raised": True} if self.lengths.raised else {}
        return {"lengths": list(self.lengths.all), "filler": self.maker.filler.digest, **raised}

    def short_figures(self, by_length: dict[int, float], facts: dict[str, Any]) -> dict[str, Any]:
        """`short` and `notes` of a report, from the headline at every length."""
        short = self.options.short or SHORT
        return {
            "short": {f"{self.headline}_{short}": by_length.get(short, float("nan"))},
            "notes": describe_short(facts["examples"], short),
        }
