"""Scoring answers: which of them does greedy decoding write, token by token, up to the end mark?

Prompts of one length are answered together, without padding. Decoding stops for a row at its first wrong token, for
nothing after it can make the answer right, and altogether when all rows are done. Shapes: n rows, T tokens of a prompt,
A of an answer.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

METHODS = ("generate", "teacher_forcing")


class FirstWrongToken(StoppingCriteria):
    """A row is done once it differs from its answer."""

    def __init__(self, prompt_length: int, answers: Tensor):
        self.prompt_length = prompt_length
        self.answers = answers

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """[n] bool, from the newest token."""
        return input_ids[:, -1] != self.answers[:, input_ids.shape[1] - self.prompt_length - 1]


def score_answers(
    model: Any, prompts: Tensor, answers: Tensor, *, end: int, pad: int, method: str, batch_tokens: int
) -> Tensor:
    """Which answers [n, A], padded on the right, greedy decoding gives to prompts [n, T]: [n] bool."""
    right = torch.empty(len(prompts), dtype=torch.bool)
    for rows in split_rows(prompts, answers, pad, batch_tokens):
        asked, expected = prompts[rows], answers[rows]
        expected = expected[:, : int((expected != pad).sum(1).max())]
        if method == "generate":
            stop = FirstWrongToken(asked.shape[1], expected.to(model.device))
            written = greedy_answers(model, asked, expected.shape[1], end=end, pad=pad, stop=stop)
            right[rows] = (written == expected).all(1)
        else:
            right[rows] = (forced_tokens(model, asked, expected) | (expected == pad)).all(1)
    return right


def split_rows(prompts: Tensor, answers: Tensor, pad: int, batch_tokens: int) -> Iterator[Tensor]:
    """Indices of rows for each batch, answers of like length together."""
    lengths = (answers != pad).sum(1)
    order = lengths.argsort(stable=True)
    rows = max(1, batch_tokens // (prompts.shape[1] + answers.shape[1]))
    yield from order.split(rows)


def greedy_answers(
    model: Any, prompts: Tensor, num_tokens: int, *, end: int, pad: int, stop: StoppingCriteria | None = None
) -> Tensor:
    """Generated continuations [n, num_tokens] of prompts [n, T] of one length, padded once they have ended."""
    output = model.generate(
        prompts.to(model.device),
        attention_mask=torch.ones_like(prompts).to(model.device),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=end,
        pad_token_id=pad,
        stopping_criteria=StoppingCriteriaList([stop] if stop is not None else []),
    )[:, prompts.shape[1] :].cpu()
    return torch.nn.functional.pad(output, (0, num_tokens - output.shape[1]), value=pad)


@torch.no_grad()
def forced_tokens(model: Any, prompts: Tensor, answers: Tensor) -> Tensor:
    """Which tokens of the answers [n, A] are the likeliest, given all that stands before them: bool.

    Causal attention lets the padding behind an answer go unmasked. As long as all tokens so far are right, this is what
    greedy decoding would write: an answer is right by the one if and only if it is by the other.
    """
    tokens = torch.cat((prompts, answers), dim=1)[:, :-1].to(model.device)
    kept = answers.shape[1]
    likeliest = model(input_ids=tokens, use_cache=False, logits_to_keep=kept).logits.argmax(-1)
    return likeliest.cpu() == answers


def forced_accuracy(model: Any, prompts: Tensor, answers: Tensor, batch_tokens: int) -> float:
    """The share of all tokens of answers [n, A] of one length that are the likeliest at their place."""
    rows = max(1, batch_tokens // (prompts.shape[1] + answers.shape[1]))
    batches = zip(prompts.split(rows), answers.split(rows), strict=True)
    return float(torch.cat([forced_tokens(model, *batch) for batch in batches]).double().mean())
