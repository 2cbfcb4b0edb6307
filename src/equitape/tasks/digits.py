"""Numbers as digits, least significant first, shared by the arithmetic tasks.

Shapes: n examples, W digits.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..settings import Positive
from .prompts import SMALL, LengthOptions, LengthTask

SYMBOLS = "0123456789+*="
PLUS, TIMES, EQUALS = (SYMBOLS.index(symbol) for symbol in "+*=")
END, PAD = len(SYMBOLS), len(SYMBOLS) + 1
VOCAB_SIZE = len(SYMBOLS) + 2


@dataclass(frozen=True, kw_only=True)
class DigitOptions(LengthOptions):
    """Sizes of the numbers."""

    trained_digits: Positive = 20
    """Maximum digits of a long operand in training; each length is drawn uniformly from 1 to this."""
    tested_digits: Positive = 40
    """Maximum digits of a long operand in evaluation."""
    unit = "digits"


class DigitTask(LengthTask):
    """The base of the arithmetic tasks and their tokens."""

    options_class = DigitOptions
    vocab_size = VOCAB_SIZE
    pad_token_id = PAD
    eos_token_id = END
    options: DigitOptions


def draw_numbers(lengths: Tensor, width: int, generator: torch.Generator) -> Tensor:
    """Random digits [n, W], least significant first, zero beyond each length, without leading zeros."""
    count = len(lengths)
    digits = torch.randint(0, 10, (count, width), generator=generator, dtype=SMALL)
    top = torch.randint(1, 10, (count, 1), generator=generator, dtype=SMALL)
    last = lengths[:, None] - 1
    # one-digit numbers may be zero
    digits.scatter_(1, last, torch.where(last > 0, top, digits[:, :1]))
    return digits * (torch.arange(width) <= last)


def add(left: Tensor, right: Tensor) -> Tensor:
    """Digit sums with carries: [n, W] + [n, W] -> [n, W + 1].

    A place above 9 carries, one below does not, and one of 9 exactly hands on what comes from the place before it. So
    the carry out of a place is decided by the last place up to it that is not 9: the highest of the numbers below.
    """
    sums = left + right
    place = torch.arange(2, 2 * sums.shape[1] + 2, 2, dtype=SMALL)
    carry = ((place + (sums > 9)) * (sums != 9)).cummax(1).values & 1
    pad = torch.nn.functional.pad
    return pad(sums - 10 * carry, (0, 1)) + pad(carry, (1, 0))


def multiply(number: Tensor, digit: Tensor) -> Tensor:
    """Numbers [n, W] times one digit each [n] -> [n, W + 1]."""
    digit = digit.to(SMALL)
    carry = torch.zeros_like(digit)
    places = []
    for place in number.unbind(1):
        total = place * digit + carry
        carry = total // 10
        places.append(total % 10)
    return torch.stack([*places, carry], dim=1)


def count_digits(number: Tensor) -> Tensor:
    """Number of digits [n] of numbers [n, W] without leading zeros; 1 for zero."""
    place = torch.arange(1, number.shape[1] + 1)
    return torch.where(number > 0, place, 1).amax(1)
