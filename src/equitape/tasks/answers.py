"""Score answers: which of them does greedy decoding produce exactly, up to the end token?

Prompts are padded on the left, so that many of different lengths are answered together. Decoding stops for a row at
its first wrong token, for nothing after it can make the answer right, and altogether when all rows are done. Shapes:
n rows, T tokens of a prompt, padded on the left, A of an answer, padded on the right.
"""

from typing import Any, Literal

import torch
from torch import Tensor
from transformers import StaticCache, StoppingCriteria

from .decoding import generate
from .static_decoding import aligned_length

Method = Literal["generate", "teacher_forcing"]


class FirstWrongToken(StoppingCriteria):
    """Stops a row at its first wrong token."""

    def __init__(self, prompt_length: int, answers: Tensor):
        self.prompt_length = prompt_length
        self.answers = answers

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """[n] bool, from the newest token."""
        return input_ids[:, -1] != self.answers[:, input_ids.shape[1] - self.prompt_length - 1]


def score_answers(
    model: Any, prompts: Tensor, answers: Tensor, *, end: int, pad: int, method: str, batch_tokens: int
) -> Tensor:
    """Which answers [n, A] greedy decoding gives to prompts [n, T]: [n] bool."""
    right = torch.empty(len(prompts), dtype=torch.bool)
    # batch answers of similar length, so that short ones do not wait for long ones
    order = (answers != pad).sum(1).argsort(stable=True)
    for rows in order.split(max(1, batch_tokens // (prompts.shape[1] + answers.shape[1]))):
        asked, expected = prompts[rows], answers[rows]
        asked = asked[:, int((asked == pad).sum(1).min()) :]
        expected = expected[:, : int((expected != pad).sum(1).max())]
        if method == "generate":
            stop = FirstWrongToken(asked.shape[1], expected.to(model.device))
            written = greedy_answers(model, asked, expected.shape[1], end=end, pad=pad, stop=stop)
            right[rows] = (written == expected).all(1)
        else:
            right[rows] = (forced_tokens(model, asked, expected, pad=pad) | (expected == pad)).all(1)
    return right


def greedy_answers(
    model: Any, prompts: Tensor, num_tokens: int, *, end: int, pad: int, stop: StoppingCriteria | None = None
) -> Tensor:
    """Greedy continuations [n, num_tokens] of prompts [n, T], padded after they end."""
    tokens, mask = prompts.to(model.device), (prompts != pad).long().to(model.device)
    cache = cache_options(model, prompts.shape[1] + num_tokens)
    output = generate(model, tokens, mask, num_tokens, [end], pad, stop, cache).cpu()
    return torch.nn.functional.pad(output, (0, num_tokens - output.shape[1]), value=pad)


def cache_options(model: Any, num_tokens: int) -> dict[str, Any]:
    """Arguments of generate: a cache of full length from the start, or none where the encoding refuses one.

    A growing cache is copied for every token. A sliding window bounds its cache anyway, and other model classes choose
    their own cache.
    """
    encoding = getattr(model.get_decoder(), "encoding", None)
    if encoding is None:
        return {}
    if encoding.cache_refusal is not None or model.generation_config.use_cache is False:
        return {"use_cache": False}
    if model.config.sliding_window is not None:
        return {}
    cache = StaticCache(config=model.config, max_cache_len=aligned_length(num_tokens))
    return {"past_key_values": cache, "disable_compile": True}


@torch.no_grad()
def forced_tokens(model: Any, prompts: Tensor, answers: Tensor, *, pad: int) -> Tensor:
    """Which tokens of the answers [n, A] are the most likely given all tokens before them: bool.

    As long as all tokens so far are right, this is what greedy decoding would write: an answer is right by the one if
    and only if it is by the other.
    """
    tokens = torch.cat((prompts, answers), dim=1)[:, :-1].to(model.device)
    # causal attention hides padding after an answer; padding before a prompt needs a mask
    before = (prompts == pad).sum(1)
    mask = (torch.arange(tokens.shape[1]) >= before[:, None]).long().to(model.device) if before.any() else None
    output = model(input_ids=tokens, attention_mask=mask, use_cache=False, logits_to_keep=answers.shape[1])
    return output.logits.argmax(-1).cpu() == answers


def forced_accuracy(model: Any, prompts: Tensor, answers: Tensor, *, pad: int, batch_tokens: int) -> float:
    """Fraction of the tokens of answers [n, A] of one length that are the most likely at their position."""
    rows = max(1, batch_tokens // (prompts.shape[1] + answers.shape[1]))
    batches = zip(prompts.split(rows), answers.split(rows), strict=True)
    return float(torch.cat([forced_tokens(model, *batch, pad=pad) for batch in batches]).double().mean())
