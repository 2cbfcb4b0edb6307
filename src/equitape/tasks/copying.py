"""Copying: repeat a row of symbols, reverse it, or leave out its blanks.

An example reads `symbols=answer`. Shapes: n examples, T tokens, W symbols.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..runs.results import EXACT_MATCH, TOKEN_ACCURACY
from ..settings import Positive
from .answers import forced_accuracy
from .base import Curve, Evaluation, evaluation_generator, require_order, scale_samples
from .prompts import SMALL, Cell, Examples, LengthOptions, LengthTask, PromptOptions, PromptTask, constant, join


@dataclass(frozen=True, kw_only=True)
class CopyOptions(LengthOptions):
    """Sizes of the rows to copy."""

    trained_symbols: Positive = 20
    """Maximum symbols per row in training, drawn uniformly from 1 to this."""
    tested_symbols: Positive = 40
    """Maximum symbols per row in evaluation."""
    alphabet: Positive = 10
    """Number of different symbols."""
    unit = "symbols"


class SymbolTask(PromptTask):
    """Tokens: symbols from 0, then blank, equals sign, end token and padding."""

    def __init__(self, options: Any):
        super().__init__(options)
        self.blank, self.equals, self.eos_token_id, self.pad_token_id = range(options.alphabet, options.alphabet + 4)
        self.vocab_size = options.alphabet + 4

    def pose(self, row: Tensor, row_lengths: Tensor, answer: Tensor, answer_lengths: Tensor) -> Examples:
        """Rows [n, W] and answers [n, W] with their lengths [n]."""
        return join(
            [(row, row_lengths), constant(self.equals, len(row))],
            [(answer, answer_lengths), constant(self.eos_token_id, len(row))],
            self.pad_token_id,
        )


class Copy(SymbolTask, LengthTask):
    """Copy a row; scored by length."""

    name = "copy"
    idea = "write a row of symbols again; longer rows than in training"
    options_class = CopyOptions
    options: CopyOptions

    def lengths(self) -> tuple[int, int]:
        return 2 * self.options.trained_symbols + 2, 2 * self.options.tested_symbols + 2

    def answer(self, row: Tensor, lengths: Tensor) -> Tensor:
        """The answers to rows [n, W] of lengths [n]."""
        return row

    def make_rows(self, lengths: Tensor, generator: torch.Generator) -> Examples:
        """Random rows of the given lengths [n]."""
        shape = len(lengths), int(lengths.max())
        row = torch.randint(0, self.options.alphabet, shape, generator=generator, dtype=SMALL)
        return self.pose(row, lengths, self.answer(row, lengths), lengths)

    def draw(self, count: int, generator: torch.Generator) -> Examples:
        return self.make_rows(
            torch.randint(1, self.options.trained_symbols + 1, (count,), generator=generator), generator
        )

    def draw_cell(self, cell: Cell, count: int, generator: torch.Generator) -> Examples:
        return self.make_rows(torch.full((count,), cell[0]), generator)

    def prompt_length(self, cell: Cell) -> int:
        return cell[0] + 1

    def answer_length(self, cell: Cell) -> int:
        return cell[0] + 1


class Reverse(Copy):
    """Reverse a row."""

    name = "reverse"
    idea = "write a row of symbols backwards; longer rows than in training"

    def answer(self, row: Tensor, lengths: Tensor) -> Tensor:
        place = (lengths[:, None] - 1 - torch.arange(row.shape[1])).clamp(min=0)
        return row.gather(1, place)


@dataclass(frozen=True, kw_only=True)
class SelectiveCopyOptions(PromptOptions):
    """Sizes of the rows: all have the same number of symbols; the tails differ in blanks."""

    symbols: Positive = 256
    """Symbols to copy."""
    blanks: Positive = 256
    """Blanks among them, in distribution."""
    dense_blanks: Positive = 128
    """Blanks in the dense tail."""
    sparse_blanks: Positive = 512
    """Blanks in the sparse tail."""
    alphabet: Positive = 15
    """Number of different symbols, without the blank."""

    def __post_init__(self) -> None:
        require_order(dense_blanks=self.dense_blanks, blanks=self.blanks, sparse_blanks=self.sparse_blanks)


class SelectiveCopy(SymbolTask):
    """Copy the symbols of a row without its blanks; scored with the trained number of blanks, fewer, and more."""

    name = "selective_copy"
    idea = "write the symbols of a row and leave out the blanks; fewer and more blanks than in training"
    options_class = SelectiveCopyOptions
    headline = "exact_match_outside_sparse"
    metrics = (EXACT_MATCH, TOKEN_ACCURACY)
    options: SelectiveCopyOptions

    def lengths(self) -> tuple[int, int]:
        return (
            2 * self.options.symbols + self.options.blanks + 2,
            2 * self.options.symbols + self.options.sparse_blanks + 2,
        )

    def draw(self, count: int, generator: torch.Generator) -> Examples:
        return self.draw_cell((self.options.blanks,), count, generator)

    def draw_cell(self, cell: Cell, count: int, generator: torch.Generator) -> Examples:
        symbols, total = self.options.symbols, self.options.symbols + cell[0]
        answer = torch.randint(0, self.options.alphabet, (count, symbols), generator=generator, dtype=SMALL)
        places = torch.rand(count, total, generator=generator).argsort(1)[:, :symbols].sort(1).values
        row = torch.full((count, total), self.blank, dtype=SMALL).scatter_(1, places, answer)
        return self.pose(row, torch.full((count,), total), answer, torch.full((count,), symbols))

    def prompt_length(self, cell: Cell) -> int:
        return self.options.symbols + cell[0] + 1

    def answer_length(self, cell: Cell) -> int:
        return self.options.symbols + 1

    def evaluate(self, model: Any, seed: int, share: float = 1.0) -> Evaluation:
        options = self.options
        tails = {
            "inside": options.blanks,
            "outside_dense": options.dense_blanks,
            "outside_sparse": options.sparse_blanks,
        }
        scores = self.score_cells(model, [(blanks,) for blanks in tails.values()], seed, share)
        metrics = {f"exact_match_{tail}": 100 * scores[blanks,] for tail, blanks in tails.items()}
        for tail, blanks in tails.items():
            metrics[f"token_accuracy_{tail}"] = 100 * self.token_accuracy(model, (blanks,), seed, share)
        shown = sorted(tails.values())
        return Evaluation(
            metrics=metrics,
            curves=[
                Curve(
                    title="exact match against blanks",
                    x_label="blanks",
                    x=[float(blanks) for blanks in shown],
                    y_label="exact match",
                    y=[scores[blanks,] for blanks in shown],
                )
            ],
        )

    def token_accuracy(self, model: Any, cell: Cell, seed: int, share: float) -> float:
        """Fraction of the answers' tokens that are most likely after the correct ones before them.

        It distinguishes models that get no complete answer right. The examples are the same.
        """
        samples = scale_samples(self.options.samples, share)
        tokens = self.draw_cell(cell, samples, evaluation_generator(seed, *cell)).tokens
        prompt = self.prompt_length(cell)
        return forced_accuracy(
            model,
            tokens[:, :prompt],
            tokens[:, prompt:],
            pad=self.pad_token_id,
            batch_tokens=self.options.batch_tokens,
        )
