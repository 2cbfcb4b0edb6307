"""Rows that ask for facts: in some rows of text, sentences with a number are planted, and asked for at the end.

Text alone rarely needs a word from far back, so a model that learns longer distances from it learns little about
finding things there. All facts of a row have one wording, so that only the key tells them apart. The wordings are not
those of the tasks passkey and needles. Planted tokens replace those of the text, so rows keep their length.
"""

from dataclasses import dataclass
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
FIRST_NAMES = (
    "Agnes", "Bruno", "Clara", "Dmitri", "Edith", "Felix", "Greta", "Hugo", "Irene", "Jonas", "Karin", "Louis", "Maud",
    "Nils", "Olga", "Pablo", "Rosa", "Simon",
)  # fmt: skip
SURNAMES = (
    "Archer", "Bennett", "Calloway", "Dawson", "Eriksen", "Foster", "Grimaldi", "Hartley", "Ibsen", "Jansen", "Keller",
    "Lombard", "Mercer", "Novak", "Osborne", "Petrov",
)  # fmt: skip
SUBJECTS = (
    "algebra", "botany", "chess", "dance", "farming", "geology", "history", "insects", "law", "music", "navigation",
    "optics", "painting", "rhetoric", "weaving",
)  # fmt: skip
METALS = ("brass", "chrome", "cobalt", "iron", "lead", "nickel", "pewter", "steel", "tin", "zinc")
ANIMALS = (
    "badger", "beaver", "bison", "donkey", "ferret", "gecko", "hare", "jackal", "lynx", "marten", "newt", "ox", "pike",
    "quail", "stork", "trout", "viper", "weasel", "wren", "yak",
)  # fmt: skip
TOKENS_PER_FACT = 128
"""A row has at most one fact for so many tokens, and at most MOST_FACTS."""
MOST_FACTS = 24
PLANTED_SHARE = 0.5
"""Facts and questions take at most this share of a row."""
DIGITS = (4, 5, 6, 7)


@dataclass(frozen=True)
class Wording:
    """One way to state a fact and to ask for it. Its key is one of `firsts` and one of `seconds`."""

    fact: str
    question: str
    firsts: tuple[str, ...]
    seconds: tuple[str, ...]


WORDINGS = (
    Wording(
        "\nThe {first} door in {second} opens with the code {code}.\n",
        "\nWhich code opens the {first} door in {second}? It opens with the code {code}.\n",
        COLOURS,
        TOWNS,
    ),
    Wording(
        "\nCaptain {first} {second} left the port with {code} barrels.\n",
        "\nHow many barrels did Captain {first} {second} have? Captain {first} {second} left the port with {code} "
        "barrels.\n",
        FIRST_NAMES,
        SURNAMES,
    ),
    Wording(
        "\nThe book on {first} by {second} has the catalogue number {code}.\n",
        "\nLook up the book on {first} by {second}. Its catalogue number is {code}.\n",
        SUBJECTS,
        SURNAMES,
    ),
    Wording(
        "\nTicket {first}-{second} was sold for {code}.\n",
        "\nFor how much was ticket {first}-{second} sold? The price of {first}-{second} was {code}.\n",
        METALS,
        ANIMALS,
    ),
)


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
    most = min(max(length // TOKENS_PER_FACT, 1), MOST_FACTS)
    count = int(random.integers(max(most // 4, 1), most + 1))
    planted = [(encode(fact), encode(question)) for fact, question in draw_facts(count, random)]
    while planted and sum(len(fact) + len(question) for fact, question in planted) > PLANTED_SHARE * length:
        planted.pop()
    if not planted:
        return row
    count = len(planted)
    questions = [token for index in random.permutation(count) for token in planted[index][1]]
    tokens = row["input_ids"].clone()
    room = length - len(questions)
    # one fact in each part of the row; the first token of a row stays
    slot = (room - 1) // count
    for index, (fact, _) in enumerate(planted):
        place = index * slot + 1 + int(random.integers(slot - len(fact) + 1))
        tokens[place : place + len(fact)] = torch.tensor(fact)
    tokens[room:] = torch.tensor(questions)
    labels = tokens.clone()
    labels[0] = row["labels"][0]
    return {"input_ids": tokens, "labels": labels}


def draw_facts(count: int, random: np.random.Generator) -> list[tuple[str, str]]:
    """Facts with their questions: one wording, different keys, a code each."""
    wording = WORDINGS[int(random.integers(len(WORDINGS)))]
    keys = [(first, second) for first in wording.firsts for second in wording.seconds]
    facts = []
    for index in random.permutation(len(keys))[:count]:
        first, second = keys[index]
        known = {"first": first, "second": second, "code": draw_code(random)}
        facts.append((wording.fact.format(**known), wording.question.format(**known)))
    return facts


def draw_code(random: np.random.Generator) -> str:
    """A number of some digits."""
    count = int(random.choice(DIGITS))
    return str(int(random.integers(10 ** (count - 1), 10**count)))
