"""Rows that ask for facts: in some rows of text, sentences with a number are planted, and asked for at the end.

Text alone rarely needs a word from far back, so a model that learns longer distances from it learns little about
finding things there. The wording is not that of the tasks passkey and needles. Planted tokens replace those of the
text, so rows keep their length.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from .packing import PackedDataset
from .tokens import PieceTokenizer

COLOURS = (
    "amber", "black", "blue", "brown", "crimson", "gold", "gray", "green", "orange", "pink", "purple", "red", "silver",
    "violet", "white", "yellow",
)  # fmt: skip
TOWNS = (
    "Ardea", "Belvoir", "Corby", "Dunmore", "Elgin", "Fermoy", "Galway", "Hexham", "Ilkley", "Jarrow", "Kelso",
    "Ludlow", "Morpeth", "Naas", "Oban",
)  # fmt: skip
FACT = "\nThe {colour} door in {town} opens with the code {code}.\n"
QUESTION = "\nWhich code opens the {colour} door in {town}? It opens with the code {code}.\n"
TOKENS_PER_FACT = 512
"""A row has one fact for so many tokens, at most MOST_FACTS."""
MOST_FACTS = 8
DIGITS = (4, 5, 6, 7)


class RecallRows(Dataset[dict[str, Tensor]]):
    """The rows of another data set, a share of them with planted facts. Row i depends only on that set, seed and i."""

    def __init__(self, rows: PackedDataset, tokenizer: Any, share: float, seed: int = 0):
        self.rows, self.tokenizer, self.share, self.seed = rows, tokenizer, share, seed
        self._encode: PieceTokenizer | None = None

    def __getstate__(self) -> dict[str, Any]:
        # processes that prepare batches make their own
        return {**self.__dict__, "_encode": None}

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.rows[index]
        random = np.random.Generator(np.random.Philox(key=[self.seed, index]))
        # rows of several pieces stay: a question belongs to the text of its facts
        if random.random() >= self.share or "segment_ids" in row:
            return row
        self._encode = self._encode or PieceTokenizer(self.tokenizer)
        return plant(row, self._encode, random)


def plant(row: dict[str, Tensor], encode: PieceTokenizer, random: np.random.Generator) -> dict[str, Tensor]:
    """A row with facts at random places and their questions, in another order, at its end; as it is if it is short."""
    length = len(row["input_ids"])
    count = min(max(length // TOKENS_PER_FACT, 1), MOST_FACTS)
    pairs = random.permutation(len(COLOURS) * len(TOWNS))[:count]
    known = [
        {"colour": COLOURS[pair % len(COLOURS)], "town": TOWNS[pair // len(COLOURS)], "code": draw_code(random)}
        for pair in pairs
    ]
    facts = [encode(FACT.format(**each)) for each in known]
    asked = [encode(QUESTION.format(**known[index])) for index in random.permutation(count)]
    questions = [token for each in asked for token in each]
    room = length - len(questions)
    slot = room // count
    if slot <= max(map(len, facts)):
        return row
    tokens = row["input_ids"].clone()
    for index, fact in enumerate(facts):
        # one fact in each part of the row; the first token of a row stays
        place = index * slot + 1 + int(random.integers(slot - len(fact)))
        tokens[place : place + len(fact)] = torch.tensor(fact)
    tokens[room:] = torch.tensor(questions)
    labels = tokens.clone()
    labels[0] = row["labels"][0]
    return {"input_ids": tokens, "labels": labels}


def draw_code(random: np.random.Generator) -> str:
    """A number of some digits."""
    count = int(random.choice(DIGITS))
    return str(int(random.integers(10 ** (count - 1), 10**count)))
