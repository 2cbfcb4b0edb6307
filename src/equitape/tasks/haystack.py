"""Prompts with an exact number of tokens: something to find inside filler.

A prompt is made of pieces that are tokenized one by one: what the tokenizer puts in front of every text, the opening,
filler with things hidden in it, and the question. Filler is counted in tokens, so the sum is exact for every tokenizer;
what does not fit is cut off its beginning. Things are hidden between two lines of filler, at the border nearest to the
depth asked for.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from ..data.text import read_documents
from ..data.tokens import PieceTokenizer

NOISE = "noise"
NOISE_LINE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"


@dataclass(frozen=True, kw_only=True)
class Hidden:
    """Something to hide, at a depth from 0 (the beginning of the filler) to 1 (its end)."""

    text: str
    depth: float


class Filler:
    """Lines irrelevant to the question, for any number of tokens."""

    def __init__(self, source: str, encode: PieceTokenizer):
        """source: "noise", five short sentences over and over; or text as `equitape.data.text` reads it."""
        texts = [NOISE_LINE] if source == NOISE else read_paragraphs(source)
        self.lines = [line for line in encode.all(texts) if line]
        if not self.lines:
            raise ValueError(f"The filler {source!r} holds no words; name a text that does, or leave it out for noise.")
        self.digest = hashlib.sha256(json.dumps(texts).encode()).hexdigest()

    def draw(self, count: int, random: Random) -> tuple[list[int], list[int]]:
        """`count` tokens that end with a whole line, and the places between lines, 0 and the end among them.

        Lines follow one another as in the source, from a random one on, and from its start again after the last.
        """
        start = random.randrange(len(self.lines))
        lines: list[list[int]] = []
        size = 0
        while size < count:
            lines.append(self.lines[(start + len(lines)) % len(self.lines)])
            size += len(lines[-1])
        surplus = size - count
        tokens = [token for line in lines for token in line][surplus:]
        borders, place = {0, count}, -surplus
        for line in lines:
            place += len(line)
            if place > 0:
                borders.add(place)
        return tokens, sorted(borders)


def read_paragraphs(source: str) -> list[str]:
    """The paragraphs of all documents, one per line."""
    paragraphs = []
    for document in read_documents(source):
        for paragraph in re.split(r"\n\s*\n", document.text):
            words = paragraph.split()
            if words:
                paragraphs.append(" ".join(words) + "\n")
    return paragraphs


def hide(tokens: list[int], borders: list[int], pieces: Sequence[tuple[list[int], float]]) -> list[int]:
    """Insert pieces (tokens, depth) between lines of filler; pieces at the same place keep their order."""
    places = [min(borders, key=lambda border: abs(border - depth * len(tokens))) for _, depth in pieces]
    order = sorted(range(len(pieces)), key=lambda index: places[index])
    result: list[int] = []
    reached = 0
    for index in order:
        result += tokens[reached : places[index]]
        result += pieces[index][0]
        reached = places[index]
    return result + tokens[reached:]


class PromptMaker:
    """Builds prompts for one tokenizer and one kind of filler."""

    def __init__(self, tokenizer: Any, filler: str):
        self.encode = PieceTokenizer(tokenizer)
        self.filler = Filler(filler, self.encode)
        self.beginning = self.encode.beginning

    def build(self, length: int, opening: str, hidden: Sequence[Hidden], question: str, random: Random) -> list[int]:
        """A prompt of exactly `length` tokens. Raises `TooShort` if the required parts do not fit."""
        head = [*self.beginning, *self.encode(opening)]
        pieces = [(self.encode(thing.text), thing.depth) for thing in hidden]
        tail = self.encode(question)
        room = length - len(head) - len(tail) - sum(len(tokens) for tokens, _ in pieces)
        if room < 0:
            raise TooShortError(length, length - room)
        tokens, borders = self.filler.draw(room, random)
        return [*head, *hide(tokens, borders, pieces), *tail]


class TooShortError(ValueError):
    """The length is too small for the prompt without filler."""

    def __init__(self, length: int, needed: int):
        super().__init__(
            f"A prompt of {length} tokens cannot be made: its instructions, what is hidden and the question alone take "
            f"{needed}. Ask for a length of {needed} or more."
        )
        self.needed = needed
