"""How a question of SCROLLS is put to a causal model, and what of a document is cut when it is too long."""

from dataclasses import dataclass
from typing import Literal

from ..settings import check_value
from .scrolls import Item
from .tokens import PieceTokenizer

CutRule = Literal["end", "middle", "start"]


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """What is particular to one of the sets."""

    metric: str
    """ "f1", "exact_match" or "rouge", as SCROLLS scores it."""
    new_tokens: int
    """Most tokens of an answer."""
    question: str = "Question"
    answer: str = "Answer"
    asks: str | None = None
    """The question, where items have none."""
    lines: bool = False
    """Whether answers have several lines; others end with the first one."""


SUMMARY = "What is a summary of the preceding text?"
DATASETS = {
    "qasper": Dataset(metric="f1", new_tokens=64),
    "contract_nli": Dataset(metric="exact_match", new_tokens=16, question="Hypothesis", answer="Conclusion"),
    "narrative_qa": Dataset(metric="f1", new_tokens=64),
    "quality": Dataset(metric="exact_match", new_tokens=64),
    "qmsum": Dataset(metric="rouge", new_tokens=256),
    "summ_screen_fd": Dataset(metric="rouge", new_tokens=256, asks=SUMMARY),
    "gov_report": Dataset(metric="rouge", new_tokens=768, asks=SUMMARY, lines=True),
    # not of SCROLLS but of ZeroSCROLLS, whose metric it shares
    "squality": Dataset(metric="rouge", new_tokens=512, lines=True),
}


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt, and how much of its document was cut."""

    tokens: list[int]
    document_tokens: int
    """Of the whole document."""
    cut_tokens: int


def question_of(dataset: str, item: Item) -> str:
    """What follows the document, up to where the answer begins."""
    facts = DATASETS[dataset]
    asked = facts.asks or item.question or SUMMARY
    # the conclusions of ContractNLI are the same everywhere, and SCROLLS does not list them
    listed = item.choices if dataset != "contract_nli" else None
    lines = [f"{facts.question}: {asked.strip()}"]
    lines += [f" ({letter}) {choice}" for letter, choice in zip("ABCDEFGH", listed or (), strict=False)]
    return "\n\n" + "\n".join(lines) + f"\n{facts.answer}:"


def kept_parts(count: int, room: int, rule: str) -> list[slice]:
    """Which of the `count` tokens of a document are kept where there is room for `room`.

    rule: "end" cuts its end, "start" its beginning, "middle" its middle.
    """
    check_value(rule, CutRule, "cut")
    if count <= room:
        return [slice(0, count)]
    front = {"end": room, "start": 0, "middle": (room + 1) // 2}[rule]
    return [slice(0, front), slice(count - (room - front), count)]


class PromptWriter:
    """Prompts of one set by one tokenizer: document, question, "Answer:". Documents are tokenized once."""

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
        """The fewest tokens of a prompt: all of it, and one token of the document."""
        return len(self.beginning) + len(self.encode(question_of(self.dataset, item))) + 1

    def write(self, item: Item, limit: int) -> Prompt:
        """A prompt of at most `limit` tokens. Only the document is ever cut."""
        question = self.encode(question_of(self.dataset, item))
        room = limit - len(self.beginning) - len(question)
        if room < 1:
            raise ValueError(
                f"A prompt of {limit} tokens has no room for a document: the question {item.id!r} alone takes "
                f"{limit - room}. Ask for a longer length."
            )
        document = self.document(item.document)
        kept = [token for part in kept_parts(len(document), room, self.rule) for token in document[part]]
        return Prompt(
            tokens=[*self.beginning, *kept, *question],
            document_tokens=len(document),
            cut_tokens=len(document) - len(kept),
        )
