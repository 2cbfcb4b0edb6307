"""Multiplication of a long number by one digit, with reversed digits; carries are up to 8.

An example reads `a*d=c`, numbers least digit first: 12 * 9 = 108 is written `21*9=801`. Shapes: n examples.
"""

import torch
from torch import Tensor

from . import digits
from .digits import END, EQUALS, PAD, TIMES, DigitTask
from .prompts import Cell, Examples, constant, join


class Multiplication(DigitTask):
    """A number times a digit; scored by the length of the number."""

    name = "multiplication"
    idea = "multiply a number by a digit, digits reversed; longer numbers than in training"

    def lengths(self) -> tuple[int, int]:
        return 2 * self.options.trained_digits + 5, 2 * self.options.tested_digits + 5

    def draw(self, count: int, generator: torch.Generator) -> Examples:
        lengths = torch.randint(1, self.options.trained_digits + 1, (count,), generator=generator)
        return make_products(lengths, generator)

    def draw_cell(self, cell: Cell, count: int, generator: torch.Generator) -> Examples:
        return make_products(torch.full((count,), cell[0]), generator)

    def prompt_length(self, cell: Cell) -> int:
        return cell[0] + 3

    def answer_length(self, cell: Cell) -> int:
        return cell[0] + 2


def make_products(lengths: Tensor, generator: torch.Generator) -> Examples:
    """Random numbers of the given lengths [n] times random digits, 0 included."""
    count = len(lengths)
    number = digits.draw_numbers(lengths, int(lengths.max()), generator)
    digit = torch.randint(0, 10, (count,), generator=generator, dtype=number.dtype)
    product = digits.multiply(number, digit)
    one = torch.ones(count, dtype=torch.long)
    return join(
        [(number, lengths), constant(TIMES, count), (digit[:, None], one), constant(EQUALS, count)],
        [(product, digits.count_digits(product)), constant(END, count)],
        PAD,
    )
