"""Prompts for SCROLLS questions, and truncation of documents that are too long."""

from dataclasses import dataclass
from typing import Literal

from ..settings import check_value
from .scrolls import Item
from .tokens import PieceTokenizer

CutRule = Literal["end", "middle", "start"]


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Properties of one SCROLLS set."""

    title: str
    """Its name in print."""
    metric: str
    """ "f1", "exact_match" or "rouge", as SCROLLS scores it."""
    new_tokens: int
    """Maximum tokens of an answer."""
    question: str = "Question"
    answer: str = "Answer"
    asks: str | None = None
    """The question, if items have none."""
    lines: bool = False
    """Whether answers may have several lines; others end with the first line."""


SUMMARY = "What is a summary of the preceding text?"
DATASETS = {
    "qasper": Dataset(title="Qasper", metric="f1", new_tokens=64),
    "contract_nli": Dataset(
        title="ContractNLI", metric="exact_match", new_tokens=16, question="Hypothesis", answer="Conclusion"
    ),
    "narrative_qa": Dataset(title="NarrativeQA", metric="f1", new_tokens=64),
    "quality": Dataset(title="QuALITY", metric="exact_match", new_tokens=64),
    "qmsum": Dataset(title="QMSum", metric="rouge", new_tokens=256),
    "summ_screen_fd": Dataset(title="SummScreenFD", metric="rouge", new_tokens=256, asks=SUMMARY),
    "gov_report": Dataset(title="GovReport", metric="rouge", new_tokens=768, asks=SUMMARY, lines=True),
    # from ZeroSCROLLS, which uses the same metric
    "squality": Dataset(title="SQuALITY", metric="rouge", new_tokens=512, lines=True),
}


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt, and how much of its document was truncated."""

    tokens: list[int]
    document_tokens: int
    """Tokens of the full document."""
    cut_tokens: int


def question_of(dataset: str, item: Item) -> str:
    """The text after the document, up to the answer."""
    facts = DATASETS[dataset]
    asked = facts.asks or item.question or SUMMARY
    # ContractNLI has the same choices everywhere, and SCROLLS does not list them
    listed = item.choices if dataset != "contract_nli" else None
    lines = [f"{facts.question}: {asked.strip()}"]
    lines += [f" ({letter}) {choice}" for letter, choice in zip("ABCDEFGH", listed or (), strict=False)]
    return "\n\n" + "\n".join(lines) + f"\n{facts.answer}:"


def kept_parts(count: int, room: int, rule: str) -> list[slice]:
    """The kept token ranges of a document with `count` tokens and room for `room`.

    rule: which part to drop: "end", "start" or "middle".
    """
    check_value(rule, CutRule, "cut")
    if count <= room:
        return [slice(0, count)]
    front = {"end": room, "start": 0, "middle": (room + 1) // 2}[rule]
    return [slice(0, front), slice(count - (room - front), count)]


class PromptWriter:
    """Prompts of one set for one tokenizer: document, question, "Answer:". Each document is tokenized once."""

    def __init__(self, dataset: str, encode: PieceTokenizer, rule: str):
        self.dataset = dataset
        self.encode = encode
        self.rule = rule
        self.beginning = encode.beginning
        self._documents: dict[str, list[int]] = {}

    def document(self, text: str) -> list[int]:
        """Tokens of a document."""
        if text not in self._documents:
            self._documents[text] = self.encode(text)
        return self._documents[text]

    def needed(self, item: Item) -> int:
        """Minimum tokens of a prompt: everything but the document, plus one document token."""
        return len(self.beginning) + len(self.encode(question_of(self.dataset, item))) + 1

    def write(self, item: Item, limit: int) -> Prompt:
        """A prompt of at most `limit` tokens. Only the document is truncated."""
        question = self.encode(question_of(self.dataset, item))
        room = limit - len(self.beginning) - len(question)
        if room < 1:
            raise ValueError(
                f"A prompt of {limit} tokens has no room for a document: question {item.id!r} alone needs "
                f"{limit - room}. Use a longer length."
            )
        document = self.document(item.document)
        kept = [token for part in kept_parts(len(document), room, self.rule) for token in document[part]]
        return Prompt(
            tokens=[*self.beginning, *kept, *question],
            document_tokens=len(document),
            cut_tokens=len(document) - len(kept),
        )
