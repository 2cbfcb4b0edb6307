"""Greedy answers to prompts of any lengths, with the cache and without padding.

Prompts of one length run as one batch. Those of different lengths are read one by one, logits made for none of their
tokens but the last; then their caches are padded on the left, joined, and the answers written together. A step that
writes sees one new token, so the mask over the padding is one row: memory stays linear in length.

There are two decoders. On CUDA, static_decoding.py replays that step as a graph: with a small model this is about ten
times as fast. It needs a model whose attention takes a prepared mask and whose cache has plain layers; transformers'
generate takes all others, and runs on the CPU, where there is nothing to capture.

Shapes: B prompts, H key-value heads, N tokens of the longest, D width of a key or value.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache, GenerationConfig, StoppingCriteria, StoppingCriteriaList

from .evaluated_model import EvaluatedModel
from .evaluation import Unit
from .perplexity import unwrap
from .static_decoding import Answers, choose_writing, prefill, write_in_steps


class FirstLine(StoppingCriteria):
    """Stops a row after its first line that is not blank."""

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
            # a token may contain the end of one line and the start of the next
            done.append("\n" in (text if begun else text.lstrip()))
        return torch.tensor(done, device=input_ids.device)


def end_tokens(evaluated: EvaluatedModel) -> list[int]:
    """Tokens that end an answer, from the tokenizer and the model's generation config."""
    settings = getattr(evaluated.model, "generation_config", None)
    given = [evaluated.tokenizer.eos_token_id, getattr(settings, "eos_token_id", None)]
    flat = [token for entry in given for token in (entry if isinstance(entry, list) else [entry])]
    return list(dict.fromkeys(token for token in flat if token is not None))


class Answer(NamedTuple):
    """A generated answer."""

    text: str
    stopped: bool
    """Whether it reached the token limit before it ended."""


def write_answers(
    evaluated: EvaluatedModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int | Sequence[int],
    one_line: bool = False,
) -> list[Answer]:
    """The most likely continuation of every prompt, up to the end token or `max_new_tokens`, of all or of each.

    one_line: stop at the end of the first line that is not blank, and return that line alone.
    """
    ends = end_tokens(evaluated)
    stop = FirstLine(evaluated.tokenizer, len(prompts)) if one_line else None
    limits = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else max_new_tokens
    written = write_tokens(evaluated, prompts, max(limits), ends, stop)
    # a batch runs until its longest answer ends; no answer may depend on the others
    return [
        decode(evaluated.tokenizer, tokens[:limit], limit, ends, one_line)
        for tokens, limit in zip(written, limits, strict=True)
    ]


@torch.no_grad()
def write_tokens(
    evaluated: EvaluatedModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    ends: list[int],
    stop: StoppingCriteria | None = None,
) -> list[list[int]]:
    """Greedy decoding, padded after the end."""
    rows = [torch.tensor(prompt, dtype=torch.long, device=evaluated.device) for prompt in prompts]
    padding = evaluated.tokenizer.pad_token_id
    if padding is None:
        padding = (ends or [0])[0]
    longest = max(len(row) for row in rows)
    # the last token is never an input
    evaluated.check_table(longest + max_new_tokens - 1)
    tokens = torch.stack([pad(row, (longest - len(row), 0)) for row in rows])
    writing = choose_writing(evaluated, [len(row) for row in rows], max_new_tokens)
    if writing != "generate":
        answers = Answers(tokens, max_new_tokens, ends, padding, stop)
        write_in_steps(evaluated, rows, answers, max_new_tokens, captured=writing == "graph")
        return answers.tolist()
    lengths = torch.tensor([len(row) for row in rows], device=evaluated.device)
    mask = (torch.arange(longest, device=evaluated.device) >= (longest - lengths)[:, None]).long()
    cache: dict[str, Any] = {} if evaluated.uses_cache else {"use_cache": False}
    if int(lengths.min()) < longest:
        cache["past_key_values"] = read_prompts(evaluated.model, rows)
    return generate(evaluated.model, tokens, mask, max_new_tokens, ends, padding, stop, cache).tolist()


@torch.no_grad()
def generate(
    model: Any,
    tokens: Tensor,
    mask: Tensor,
    max_new_tokens: int,
    ends: list[int],
    padding: int,
    stop: StoppingCriteria | None = None,
    cache: dict[str, Any] | None = None,
) -> Tensor:
    """Greedy decoding by transformers' generate, of prompts [B, N] padded on the left: what was written, [B, any].

    A row that has ended is padded; all rows end when the last one has. cache: arguments about the cache.
    """
    cache = dict(cache or {})
    settings = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        num_beams=1,
        use_cache=cache.pop("use_cache", True),
        disable_compile=cache.pop("disable_compile", False),
        eos_token_id=ends or None,
        pad_token_id=padding,
    )
    with without_reminder(), without_own_settings(model):
        written = model.generate(
            tokens,
            attention_mask=mask,
            generation_config=settings,
            stopping_criteria=StoppingCriteriaList([] if stop is None else [stop]),
            **cache,
        )
    return written[:, tokens.shape[1] :]


@contextmanager
def without_own_settings(model: Any) -> Iterator[None]:
    """Ignore a checkpoint's generation config, which would fill in every argument not given."""
    inner = unwrap(model)
    own = getattr(inner, "generation_config", None)
    inner.generation_config = GenerationConfig()
    try:
        yield
    finally:
        inner.generation_config = own


@contextmanager
def without_reminder() -> Iterator[None]:
    """Silence transformers' warning about inputs beyond a model's context, which evaluations use on purpose."""
    logger = logging.getLogger("transformers.generation.stopping_criteria")

    def keep(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("This is a friendly reminder")

    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


def decode(tokenizer: Any, tokens: list[int], max_new_tokens: int, ends: list[int], one_line: bool) -> Answer:
    """The text of an answer without what ended it."""
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
    """All tokens of the prompts but the last of each, in one growing cache, padded on the left."""
    joined = DynamicCache()
    for index, (keys, values) in enumerate(prefill(model, rows, max(len(row) for row in rows) - 1)):
        joined.update(keys, values, index)
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
