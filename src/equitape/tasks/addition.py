"""Addition with reversed digits, the task that shows whether an encoding reaches beyond its training lengths.

An example reads `a+b=c` with every number least digit first: 12 + 9 = 21 is written `21+9=12`. The loss counts only the
answer and the end mark. Shapes: n examples, T tokens, W digits.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SYMBOLS = "0123456789+="
PLUS, EQUALS = SYMBOLS.index("+"), SYMBOLS.index("=")
END, PAD = len(SYMBOLS), len(SYMBOLS) + 1
VOCAB_SIZE = len(SYMBOLS) + 2
IGNORED = -100


@dataclass(frozen=True)
class Sums:
    """A batch of examples as tokens [n, T], padded on the right, with the lengths of their parts [n]."""

    tokens: Tensor
    prompt_lengths: Tensor
    lengths: Tensor

    def training_inputs(self) -> dict[str, Tensor]:
        """What a causal language model trains on: only the answer and the end mark have labels."""
        column = torch.arange(self.tokens.shape[1])
        answer = (column >= self.prompt_lengths[:, None]) & (column < self.lengths[:, None])
        return {
            "input_ids": self.tokens,
            "attention_mask": (column < self.lengths[:, None]).long(),
            "labels": torch.where(answer, self.tokens, IGNORED),
        }


def draw_lengths(count: int, max_digits: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Lengths of both operands, each uniform from 1 to max_digits."""
    lengths = torch.randint(1, max_digits + 1, (2, count), generator=generator)
    return lengths[0], lengths[1]


def make_sums(left_lengths: Tensor, right_lengths: Tensor, generator: torch.Generator) -> Sums:
    """Random sums whose operands have the given numbers of digits [n]."""
    width = int(torch.maximum(left_lengths, right_lengths).max())
    left, right = _draw_numbers(left_lengths, width, generator), _draw_numbers(right_lengths, width, generator)
    total = _add(left, right)
    total_lengths = torch.maximum(left_lengths, right_lengths)
    total_lengths = total_lengths + total.gather(1, total_lengths[:, None])[:, 0]

    prompt = left_lengths + right_lengths + 2
    lengths = prompt + total_lengths + 1
    column = torch.arange(int(lengths.max()))[None].expand(len(lengths), -1)

    def digits(numbers: Tensor, start: Tensor) -> Tensor:
        return numbers.gather(1, (column - start[:, None]).clamp(0, numbers.shape[1] - 1))

    tokens = torch.full_like(column, PAD)
    parts = [
        (torch.zeros_like(left_lengths), left_lengths, left),
        (left_lengths + 1, right_lengths, right),
        (prompt, total_lengths, total),
    ]
    for start, length, numbers in parts:
        inside = (column >= start[:, None]) & (column < (start + length)[:, None])
        tokens = torch.where(inside, digits(numbers, start), tokens)
    for place, symbol in ((left_lengths, PLUS), (prompt - 1, EQUALS), (lengths - 1, END)):
        tokens = tokens.scatter(1, place[:, None], symbol)
    return Sums(tokens, prompt, lengths)


def _draw_numbers(lengths: Tensor, width: int, generator: torch.Generator) -> Tensor:
    """Digits [n, W], least first, zero beyond each length; the top digit of a longer number is not zero."""
    count = len(lengths)
    digits = torch.randint(0, 10, (count, width), generator=generator)
    top = torch.randint(1, 10, (count, 1), generator=generator)
    last = lengths[:, None] - 1
    digits = torch.where(lengths[:, None] > 1, digits.scatter(1, last, top), digits)
    return digits.masked_fill(torch.arange(width) > last, 0)


def _add(left: Tensor, right: Tensor) -> Tensor:
    """Digit sums with carries: [n, W] + [n, W] -> [n, W + 1]."""
    carry = torch.zeros(len(left), dtype=left.dtype)
    places = []
    for place in (left + right).unbind(1):
        place = place + carry
        carry = place // 10
        places.append(place % 10)
    return torch.stack([*places, carry], dim=1)


@torch.no_grad()
def exact_match(model: Any, left_digits: int, right_digits: int, count: int, generator: torch.Generator) -> float:
    """Share of sums of this size that greedy generation gets right in every digit, the end mark included."""
    lengths = torch.full((count,), left_digits), torch.full((count,), right_digits)
    sums = make_sums(*lengths, generator)
    prompt = left_digits + right_digits + 2
    answers = sums.tokens[:, prompt:]
    written = greedy_answers(model, sums.tokens[:, :prompt], answers.shape[1])
    return float((written == answers).all(1).double().mean())


def greedy_answers(model: Any, prompts: Tensor, num_tokens: int) -> Tensor:
    """Generated continuations [n, num_tokens] of prompts [n, T] of one length, padded after the end mark."""
    output = model.generate(
        prompts.to(model.device),
        attention_mask=torch.ones_like(prompts).to(model.device),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=END,
        pad_token_id=PAD,
    )[:, prompts.shape[1] :].cpu()
    return torch.nn.functional.pad(output, (0, num_tokens - output.shape[1]), value=PAD)


def encode(left: int, right: int) -> Tensor:
    """The prompt of one sum: [1, T]."""
    text = f"{str(left)[::-1]}+{str(right)[::-1]}="
    return torch.tensor([[SYMBOLS.index(symbol) for symbol in text]])


def decode(tokens: Tensor) -> str:
    """The number a continuation [T] writes, most significant digit first; "?" where it is not a number."""
    written = [int(token) for token in tokens]
    written = written[: written.index(END)] if END in written else written
    if not written or any(token > 9 for token in written):
        return "?"
    return "".join(SYMBOLS[token] for token in reversed(written))
