"""Addition with reversed digits: does an encoding work beyond the lengths it was trained on?

An example reads `a+b=c` with every number least digit first: 12 + 9 = 21 is written `21+9=12`. The loss counts only the
answer and the end token. Shapes: n examples, T tokens, W digits.
"""

from typing import Any

import torch
from torch import Tensor

from . import digits
from .base import IGNORED, Evaluation, HeatMap
from .digits import END, EQUALS, PAD, PLUS, SYMBOLS, VOCAB_SIZE, DigitTask
from .prompts import Cell, Examples, constant, join, mean_percent

__all__ = ["END", "IGNORED", "PAD", "SYMBOLS", "VOCAB_SIZE", "Addition", "draw_lengths", "make_sums"]


class Addition(DigitTask):
    """Sums of two numbers, scored on a grid of the lengths of both."""

    name = "addition"
    idea = "add two numbers, digits reversed; longer operands than in training"

    def lengths(self) -> tuple[int, int]:
        return total_length(self.options.trained_digits), total_length(self.options.tested_digits)

    def draw(self, count: int, generator: torch.Generator) -> Examples:
        return make_sums(*draw_lengths(count, self.options.trained_digits, generator), generator)

    def draw_cell(self, cell: Cell, count: int, generator: torch.Generator) -> Examples:
        left, right = cell
        return make_sums(torch.full((count,), left), torch.full((count,), right), generator)

    def prompt_length(self, cell: Cell) -> int:
        return sum(cell) + 2

    def answer_length(self, cell: Cell) -> int:
        return max(cell) + 2

    def evaluate(self, model: Any, seed: int, share: float = 1.0) -> Evaluation:
        lengths = self.options.sizes
        scores = self.score_cells(model, [(left, right) for left in lengths for right in lengths], seed, share)
        grid = HeatMap(
            title="exact match",
            row_label="digits of the first operand",
            rows=lengths,
            column_label="digits of the second operand",
            columns=lengths,
            values=[[scores[left, right] for right in lengths] for left in lengths],
        )
        everywhere = mean_percent(scores, lambda cell: True)
        return Evaluation(metrics={"exact_match_grid": everywhere, **self.means(scores)}, heat_maps=[grid])


def total_length(num_digits: int) -> int:
    """Tokens of the longest sum: two operands, two signs, an answer with one digit more, the end token."""
    return 3 * num_digits + 4


def draw_lengths(count: int, max_digits: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Lengths of both operands, each uniform from 1 to max_digits."""
    lengths = torch.randint(1, max_digits + 1, (2, count), generator=generator)
    return lengths[0], lengths[1]


def make_sums(left_lengths: Tensor, right_lengths: Tensor, generator: torch.Generator) -> Examples:
    """Random sums whose operands have the given numbers of digits [n]."""
    count, width = len(left_lengths), int(torch.maximum(left_lengths, right_lengths).max())
    left = digits.draw_numbers(left_lengths, width, generator)
    right = digits.draw_numbers(right_lengths, width, generator)
    total = digits.add(left, right)
    longer = torch.maximum(left_lengths, right_lengths)
    total_lengths = longer + total.gather(1, longer[:, None])[:, 0]
    return join(
        [(left, left_lengths), constant(PLUS, count), (right, right_lengths), constant(EQUALS, count)],
        [(total, total_lengths), constant(END, count)],
        PAD,
    )
