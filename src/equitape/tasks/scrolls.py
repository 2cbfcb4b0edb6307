"""Questions about long documents in the manner of SCROLLS, to fine-tune on: document, question, answer, end token.

Prompts, cutting and scores are those of `equitape eval --task scrolls:NAME`. Only the answer and the end token have
labels.
"""

import logging
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..data.packing import EpochOrder
from ..data.scrolls import Item, load_examples
from ..data.scrolls_prompts import DATASETS, CutRule, PromptWriter, kept_parts, question_of
from ..data.tokenizers import load_tokenizer
from ..data.tokens import PieceTokenizer, special_tokens
from ..registry import describe_choices
from ..runs.results import PERCENT, Metric
from ..settings import Positive, Settings
from .base import ENDLESS, IGNORED, Evaluation, Task, scale_samples
from .decoding import batches_of, write_answers
from .evaluated_model import EvaluatedModel
from .evaluation import Unit
from .scrolls_evaluation import SCORES, score_answers, spread
from .text_metrics import require_rouge

ANSWER_LOSS = Metric(name="answer_loss", higher_is_better=False)
DOCUMENTS_CUT = Metric(name="documents_cut", higher_is_better=None, unit=PERCENT)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ScrollsTaskOptions(Settings):
    """Options of fine-tuning on SCROLLS."""

    dataset: str = ""
    """qasper, contract_nli, narrative_qa, quality, qmsum, summ_screen_fd, gov_report or squality."""
    train: str | None = None
    """File, folder or archive with its training split; default: data/scrolls, then the official data set."""
    valid: str | None = None
    """The same for its validation split."""
    tokenizer: str = "bytes"
    """"bytes", or the folder of the tokenizer the starting checkpoint was trained with."""
    length: Positive = 1024
    """Maximum tokens per example, including answer and end token; longer documents are cut."""
    cut: CutRule = "end"
    """What longer documents lose: their "end" (as in SCROLLS), "middle" or "start"."""
    samples: Positive = 100
    """Questions in a full evaluation, spread evenly over all."""


Row = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Tokens of a document, a question about it, and an answer with its end token."""


class QuestionExamples(Dataset[dict[str, Tensor]]):
    """Every question with each of its answers, shuffled in every epoch. Indices continue without end."""

    def __init__(self, rows: list[Row], beginning: list[int], length: int, rule: str, seed: int, summary: str = ""):
        """beginning: the tokens before every document; length: of an example; rule: what longer documents lose;
        summary: a sentence about the rows.
        """
        self.rows = rows
        self.summary = summary
        self.beginning = np.array(beginning, np.int64)
        self.length = length
        self.rule = rule
        self._shuffled = EpochOrder(len(rows), seed)

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        document, question, answer = self.rows[self._shuffled[index]]
        room = self.length - len(self.beginning) - len(question) - len(answer)
        kept = [document[part] for part in kept_parts(len(document), room, self.rule)]
        tokens = torch.from_numpy(np.concatenate((self.beginning, *kept, question, answer)))
        labels = tokens.clone()
        labels[: len(tokens) - len(answer)] = IGNORED
        return {"input_ids": tokens, "labels": labels}


class Scrolls(Task):
    """Answer questions about long documents."""

    name = "scrolls"
    idea = "fine-tuning on questions about long documents (SCROLLS), from a checkpoint"
    options_class = ScrollsTaskOptions
    options: ScrollsTaskOptions
    headline = "score"
    metrics = (*SCORES, ANSWER_LOSS, DOCUMENTS_CUT)

    def __init__(self, options: ScrollsTaskOptions):
        super().__init__(options)
        if options.dataset not in DATASETS:
            raise ValueError(
                f"Task 'scrolls': there is no set {options.dataset!r}.{describe_choices(options.dataset, DATASETS)}"
            )
        self.tokenizer = load_tokenizer(options.tokenizer)
        self.vocab_size = len(self.tokenizer)
        self.pad_token_id = special_tokens(self.tokenizer)["pad_id"]
        self.bos_token_id = self.tokenizer.bos_token_id
        self.eos_token_id = self.tokenizer.eos_token_id
        if self.eos_token_id is None:
            raise ValueError(
                f"Task 'scrolls': the tokenizer in {options.tokenizer!r} has no mark for the end of answers."
            )
        trained = load_examples(options.dataset, options.train, "train")
        judged = load_examples(options.dataset, options.valid, "valid")
        self.train_items, self.valid_items = trained.items, judged.items
        self._digest = f"{trained.digest} {judged.digest}"
        self._check_room()

    @property
    def data_digest(self) -> str:
        return self._digest

    def lengths(self) -> tuple[int, int]:
        return self.options.length, self.options.length

    @property
    def answer_tokens(self) -> int:
        """Maximum tokens per answer: the set's default, at most half of the length."""
        return min(DATASETS[self.options.dataset].new_tokens, self.options.length // 2)

    def _check_room(self) -> None:
        """Raise ValueError if the length does not fit every question, its longest answer, and part of a document."""
        encode = PieceTokenizer(self.tokenizer)
        questions = [question_of(self.options.dataset, item) for item in (*self.train_items, *self.valid_items)]
        longest = max(len(tokens) for tokens in encode.all(list(dict.fromkeys(questions))))
        needed = longest + len(encode.beginning) + self.answer_tokens + 1
        if needed > self.options.length:
            raise ValueError(
                f"Task 'scrolls': a length of {self.options.length} has no room for a document next to the longest "
                f"question, {longest} tokens, and an answer; it must be more than {needed}."
            )

    def training_set(self, seed: int) -> QuestionExamples:
        rows, beginning, summary = self._training_rows
        return QuestionExamples(rows, beginning, self.options.length, self.options.cut, seed, summary)

    @cached_property
    def _training_rows(self) -> tuple[list[Row], list[int], str]:
        """Every question with each of its answers, the tokens before all of them, and a sentence on cuts."""
        encode = PieceTokenizer(self.tokenizer)
        beginning = encode.beginning
        texts = list(dict.fromkeys(item.document for item in self.train_items))
        documents = {text: np.array(tokens, np.int64) for text, tokens in zip(texts, encode.all(texts), strict=True)}
        rows, short, cut_answers = [], 0, 0
        for item in self.train_items:
            document = documents[item.document]
            question = np.array(encode(question_of(self.options.dataset, item)), np.int64)
            for answer in encode.all([f" {answer.strip()}" for answer in item.answers]):
                cut_answers += len(answer) >= self.answer_tokens
                ended = np.array([*answer[: self.answer_tokens - 1], self.eos_token_id], np.int64)
                short += len(beginning) + len(document) + len(question) + len(ended) <= self.options.length
                rows.append((document, question, ended))
        summary = (
            f"{len(rows):,} questions with an answer; {len(rows) - short:,} lose the {self.options.cut} of their "
            f"documents, {cut_answers:,} the end of their answers."
        )
        return rows, beginning, summary

    def evaluate(self, model: Any, seed: int, share: float = 1.0) -> Evaluation:
        """The score of SCROLLS in per cent, and the loss of the reference answers in nats per token."""
        evaluated = EvaluatedModel(model=model, tokenizer=self.tokenizer, name="trained")
        writer = PromptWriter(self.options.dataset, PieceTokenizer(self.tokenizer), self.options.cut)
        items = spread(self.valid_items, scale_samples(self.options.samples, share))
        limit = self.options.length - self.answer_tokens
        prompts = [writer.write(item, limit) for item in items]
        units = [
            Unit(key=str(number), length=len(prompt.tokens) + self.answer_tokens, content=number)
            for number, prompt in enumerate(prompts)
        ]
        answers = [""] * len(items)
        one_line = not DATASETS[self.options.dataset].lines
        for batch in batches_of(units, evaluated.batch_tokens, evaluated.mixes_lengths):
            written = write_answers(
                evaluated, [prompts[unit.content].tokens for unit in batch], self.answer_tokens, one_line
            )
            for unit, answer in zip(batch, written, strict=True):
                answers[unit.content] = answer.text.strip()
        records = [
            {"answer": answer, "references": list(item.answers)} for answer, item in zip(answers, items, strict=True)
        ]
        return Evaluation(
            metrics={
                **self._score(records),
                "answer_loss": self._answer_loss(evaluated, items, [prompt.tokens for prompt in prompts]),
                "documents_cut": 100 * sum(prompt.cut_tokens > 0 for prompt in prompts) / len(prompts),
            }
        )

    def _score(self, records: list[dict[str, Any]]) -> dict[str, float]:
        try:
            if DATASETS[self.options.dataset].metric == "rouge":
                require_rouge()
        except ValueError as error:
            # a missing package must not end a long run before it saves its weights
            logger.warning("The answers were not scored: %s", error)
            return {"score": math.nan}
        return score_answers(self.options.dataset, records)

    @torch.no_grad()
    def _answer_loss(self, evaluated: EvaluatedModel, items: list[Item], prompts: list[list[int]]) -> float:
        """Loss of the first reference of every question, including the end token."""
        encode = PieceTokenizer(self.tokenizer)
        total, count = 0.0, 0
        for item, prompt in zip(items, prompts, strict=True):
            answer = [*encode(f" {item.answers[0].strip()}")[: self.answer_tokens - 1], self.eos_token_id]
            tokens = torch.tensor([*prompt, *answer[:-1]], device=evaluated.device)[None]
            logits = evaluated.model(input_ids=tokens, use_cache=False, logits_to_keep=len(answer)).logits[0]
            wanted = torch.tensor(answer, device=evaluated.device)
            total += float(torch.nn.functional.cross_entropy(logits.float(), wanted, reduction="sum"))
            count += len(answer)
        return total / count
