"""Greedy answers to prompts of any lengths, with the cache and without padding.

Prompts of one length run as one batch. Those of different lengths are read one by one, logits made for none of their
tokens but the last; then their caches are padded on the left, joined, and the answers written together. A step that
writes sees one new token, so the mask over the padding is one row: memory stays linear in length. On CUDA that step is
replayed as a graph where the model allows it (steps.py). Shapes: B prompts, H key-value heads, N tokens of the longest,
D width of a key or value.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache, GenerationConfig, StoppingCriteria, StoppingCriteriaList

from ..tasks.perplexity import unwrap
from .base import Unit
from .steps import Answers, choose_writing, write_in_steps
from .subject import Subject


class FirstLine(StoppingCriteria):
    """A row is done once a line has ended that is not blank."""

    def __init__(self, tokenizer: Any, rows: int):
        self.tokenizer = tokenizer
        self.begun = [False] * rows
        self._texts: dict[int, str] = {}

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """[B] bool, from the newest token."""
        done = []
        for row, token in enumerate(input_ids[:, -1].tolist()):
            text = self._texts.setdefault(token, self.tokenizer.decode([token]))
            begun = self.begun[row]
            self.begun[row] = begun or bool(text.strip())
            # a token may hold the end of one line and the beginning of the next
            done.append("\n" in (text if begun else text.lstrip()))
        return torch.tensor(done, device=input_ids.device)


def end_tokens(subject: Subject) -> list[int]:
    """What ends an answer, by the tokenizer and by the model's own settings for generation."""
    settings = getattr(subject.model, "generation_config", None)
    given = [subject.tokenizer.eos_token_id, getattr(settings, "eos_token_id", None)]
    flat = [token for entry in given for token in (entry if isinstance(entry, list) else [entry])]
    return list(dict.fromkeys(token for token in flat if token is not None))


class Answer(NamedTuple):
    """What a model wrote."""

    text: str
    stopped: bool
    """Whether the limit of tokens came before any end."""


def write_answers(
    subject: Subject, prompts: Sequence[Sequence[int]], max_new_tokens: int, one_line: bool = False
) -> list[Answer]:
    """The likeliest continuation of every prompt, up to the end mark or `max_new_tokens`.

    one_line: stop at the end of the first line that is not blank, and return that line alone.
    """
    ends = end_tokens(subject)
    stop = FirstLine(subject.tokenizer, len(prompts)) if one_line else None
    written = write_tokens(subject, prompts, max_new_tokens, ends, stop)
    return [decode(subject.tokenizer, tokens, max_new_tokens, ends, one_line) for tokens in written]


@torch.no_grad()
def write_tokens(
    subject: Subject,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    ends: list[int],
    stop: StoppingCriteria | None = None,
) -> list[list[int]]:
    """Greedy decoding; what follows an end is padding."""
    rows = [torch.tensor(prompt, dtype=torch.long, device=subject.device) for prompt in prompts]
    padding = subject.tokenizer.pad_token_id
    if padding is None:
        padding = (ends or [0])[0]
    longest = max(len(row) for row in rows)
    # the last token is written and never read
    subject.check_table(longest + max_new_tokens - 1)
    tokens = torch.stack([pad(row, (longest - len(row), 0)) for row in rows])
    writing = choose_writing(subject, [len(row) for row in rows], max_new_tokens)
    if writing != "generate":
        answers = Answers(tokens, max_new_tokens, ends, padding, stop)
        write_in_steps(subject, rows, answers, max_new_tokens, captured=writing == "graph")
        return answers.tolist()
    settings = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        num_beams=1,
        use_cache=subject.uses_cache,
        eos_token_id=ends or None,
        pad_token_id=padding,
    )
    lengths = torch.tensor([len(row) for row in rows], device=subject.device)
    mask = (torch.arange(longest, device=subject.device) >= (longest - lengths)[:, None]).long()
    past = {}
    if int(lengths.min()) < longest:
        past["past_key_values"] = read_prompts(subject.model, rows)
    with without_reminder(), without_own_settings(subject.model):
        written = subject.model.generate(
            tokens,
            attention_mask=mask,
            generation_config=settings,
            stopping_criteria=StoppingCriteriaList([] if stop is None else [stop]),
            **past,
        )
    return written[:, longest:].tolist()


@contextmanager
def without_own_settings(model: Any) -> Iterator[None]:
    """Leave out a checkpoint's own settings for generation, which fill in whatever a call does not name."""
    inner = unwrap(model)
    own = getattr(inner, "generation_config", None)
    inner.generation_config = GenerationConfig()
    try:
        yield
    finally:
        inner.generation_config = own


@contextmanager
def without_reminder() -> Iterator[None]:
    """Leave out what transformers says beyond a model's context, where evaluations mean to go; all else is said."""
    logger = logging.getLogger("transformers.generation.stopping_criteria")

    def keep(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("This is a friendly reminder")

    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


def decode(tokenizer: Any, tokens: list[int], max_new_tokens: int, ends: list[int], one_line: bool) -> Answer:
    """The text of an answer before what ended it."""
    for place, token in enumerate(tokens):
        if token in ends:
            tokens = tokens[:place]
            break
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    if not one_line:
        return Answer(text, len(tokens) >= max_new_tokens)
    line, newline, _ = text.lstrip().partition("\n")
    return Answer(line, len(tokens) >= max_new_tokens and not newline)


def read_prompts(model: Any, rows: list[Tensor]) -> DynamicCache:
    """All tokens of the prompts but the last of each, in one cache, padded on the left."""
    # generate reads the last token itself, and makes its logits
    few = {"logits_to_keep": 1} if model._supports_logits_to_keep() else {}
    caches = [model(input_ids=row[None, :-1], use_cache=True, **few).past_key_values for row in rows]
    longest = max(len(row) for row in rows) - 1
    joined = DynamicCache()
    for index in range(len(caches[0].layers)):
        layers = [cache.layers[index] for cache in caches]
        keys, values = (
            torch.cat([pad(part, (0, 0, longest - part.shape[2], 0)) for part in parts])
            for parts in zip(*((layer.keys, layer.values) for layer in layers), strict=True)
        )
        joined.update(keys, values, index)
        for layer in layers:
            # not held twice
            layer.keys = layer.values = None
    return joined


def batches_of(units: Sequence[Unit], batch_tokens: int, mix: bool) -> Iterator[list[Unit]]:
    """Units to be done together, the longest first: what does not fit into memory shows at once.

    They are of one length, or of like lengths where `mix` allows it.
    """
    batch: list[Unit] = []
    for unit in sorted(units, key=lambda unit: -unit.length):
        together = mix or (batch and batch[0].length == unit.length)
        if batch and not (together and (len(batch) + 1) * batch[0].length <= batch_tokens):
            yield batch
            batch = []
        batch.append(unit)
    if batch:
        yield batch
