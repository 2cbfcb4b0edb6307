"""Lengths of prompts: the given ones, or lengths that suit the model, and one short length.

What a prompt's own words take depends on the tokenizer and on what is drawn, and what is drawn depends on the length.
So every prompt of every length is measured before the first one runs.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from .haystack import TooShortError

SHORT = 512
"""The default short length."""
STEP = 64
"""Chosen lengths are multiples of this, so that seeds with slightly longer words get the same length."""

Need = Callable[[int], tuple[int, str]]
"""(tokens that the largest prompt of a length takes without filler, what to call that prompt)."""


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """The lengths of an evaluation."""

    all: tuple[int, ...]
    short: int
    raised: bool
    """Whether no short length was given and the default one is too short."""


def choose_lengths(given: tuple[int, ...], short: int | None, context: int | None, need: Need, task: str) -> Lengths:
    """Raise ValueError for given lengths that are too short for a prompt; choose missing ones so that all fit."""
    for length in sorted({*given, *([] if short is None else [short])}):
        needed, which = need(length)
        if needed > length:
            raise ValueError(
                f"Task {task!r}{which}: A prompt of {length} tokens cannot be made: its instructions, what is hidden "
                f"and the question alone take up to {needed}. A length of {smallest_fit(needed, need)} does for all "
                f"prompts."
            )
    chosen = smallest_fit(SHORT, need) if short is None else short
    kept = given or tuple(length for length in default_lengths(context, chosen) if need(length)[0] <= length)
    return Lengths(all=tuple(sorted({*kept, chosen})), short=chosen, raised=short is None and chosen > SHORT)


def smallest_fit(length: int, need: Need) -> int:
    """The length, or the next multiple of STEP that fits all prompts."""
    while need(length)[0] > length:
        length = (max(length, need(length)[0] - 1) // STEP + 1) * STEP
    return length


def measure(make: Callable[[], object]) -> int:
    """Tokens of a prompt without filler, found by asking for a length of 0."""
    try:
        make()
    except TooShortError as error:
        return error.needed
    return 0


def describe_short(examples: dict[str, object], short: int) -> list[str]:
    """A note if the short length is not the default."""
    if not examples.get("short_raised"):
        return []
    return [
        f"The short length is {short} tokens instead of {SHORT}: prompts of {SHORT} of this tokenizer do not hold what "
        f"must be in them."
    ]


def default_lengths(context: int | None, short: int) -> list[int]:
    """Lengths inside, at and beyond the model's context."""
    context = context or 2048
    return [length for length in (context // 8, context // 4, context // 2, context, 2 * context) if length >= short]


def split_by_context(lengths: Iterable[int], context: int | None) -> dict[str, list[int]]:
    """Lengths up to the trained context and beyond it, if it is known, without empty lists."""
    if context is None:
        return {}
    parts = {
        "inside": [length for length in lengths if length <= context],
        "outside": [length for length in lengths if length > context],
    }
    return {name: kept for name, kept in parts.items() if kept}
