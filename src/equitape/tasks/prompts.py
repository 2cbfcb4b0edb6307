"""Tasks with a prompt and an answer up to the end token, made in blocks.

Only the answer and the end token have labels. An answer counts when every token of it, the end token included, is what
greedy decoding writes. Sizes of what is asked (digits, symbols) are grouped in cells; the examples of a cell depend on
the seed and the cell alone. Shapes: n examples, T tokens, W symbols of a part, A tokens of an answer.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import Dataset

from ..runs.results import EXACT_MATCH
from ..settings import Positive, Settings
from .answers import Method, score_answers
from .base import IGNORED, Curve, Evaluation, NumberedExamples, Task, evaluation_generator, scale_samples

Cell = tuple[int, ...]
"""Sizes that are scored separately, for example the lengths of both operands."""
Part = tuple[Tensor, Tensor]
"""Symbols [n, W] of type SMALL, and their numbers [n]."""
SMALL = torch.int16
"""Dtype of symbols: making examples is bound by memory, so small numbers are faster."""


@dataclass(frozen=True, kw_only=True)
class PromptOptions(Settings):
    """How answers are scored."""

    samples: Positive = 100
    """Examples scored in each cell."""
    method: Method = "generate"
    """"generate": greedy decoding with the cache. "teacher_forcing": one forward pass over prompt and answer, which
    finds the same answers right and is faster."""
    batch_tokens: Positive = 2**18
    """Tokens per evaluation batch, including answers."""


@dataclass(frozen=True)
class Examples:
    """A batch of examples as tokens [n, T], padded on the right, with the lengths of prompts and of the whole [n]."""

    tokens: Tensor
    prompt_lengths: Tensor
    lengths: Tensor

    def labels(self) -> Tensor:
        """[n, T]: the answer and the end token."""
        column = torch.arange(self.tokens.shape[1])
        answer = (column >= self.prompt_lengths[:, None]) & (column < self.lengths[:, None])
        return torch.where(answer, self.tokens, IGNORED)


def constant(symbol: int, count: int) -> Part:
    """The same symbol in every example."""
    return torch.full((count, 1), symbol, dtype=SMALL), torch.ones(count, dtype=torch.long)


def join(prompt: list[Part], answer: list[Part], filler: int) -> Examples:
    """Concatenate the parts of each row, without their padding; fill up the rest."""
    parts = [*prompt, *answer]
    ends = torch.stack([lengths for _, lengths in parts]).cumsum(0)
    count, longest = len(ends[-1]), int(ends[-1].max())
    symbols = torch.cat([*(symbols for symbols, _ in parts), torch.full((count, 1), filler, dtype=SMALL)], dim=1)
    # index into the symbols: the column itself, plus the padding of all parts that have ended
    place = torch.arange(longest, dtype=SMALL)
    source = place.repeat(count, 1)
    for (part, lengths), end in zip(parts, ends.to(SMALL), strict=True):
        unused = (part.shape[1] - lengths).to(SMALL)
        if unused.any():
            source += (place >= end[:, None]) * unused[:, None]
    tokens = symbols.gather(1, source.clamp_(max=symbols.shape[1] - 1).long())
    return Examples(tokens.long(), ends[len(prompt) - 1], ends[-1])


class PromptTask(Task):
    """The base of these tasks. Subclasses draw training examples, make evaluation cells, and summarize scores."""

    options: PromptOptions
    eos_token_id: int

    def draw(self, count: int, generator: torch.Generator) -> Examples:
        """Examples to train on."""
        raise NotImplementedError

    def draw_cell(self, cell: Cell, count: int, generator: torch.Generator) -> Examples:
        """Examples of one cell."""
        raise NotImplementedError

    def prompt_length(self, cell: Cell) -> int:
        """Tokens of every prompt of a cell."""
        raise NotImplementedError

    def answer_length(self, cell: Cell) -> int:
        """Maximum tokens of a cell's answers, including the end token."""
        raise NotImplementedError

    def make_block(self, count: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Training examples in the form `NumberedExamples` takes."""
        examples = self.draw(count, generator)
        return {"input_ids": examples.tokens, "labels": examples.labels(), "lengths": examples.lengths}

    def training_set(self, seed: int) -> Dataset[dict[str, Tensor]]:
        return NumberedExamples(self.make_block, seed)

    def score_cells(self, model: Any, cells: list[Cell], seed: int, share: float) -> dict[Cell, float]:
        """Fraction of correct answers in each cell. A batch has as many cells as fit."""
        samples = scale_samples(self.options.samples, share)
        scores: dict[Cell, float] = {}
        for group in self.group_cells(cells, samples):
            drawn = [self.draw_cell(cell, samples, evaluation_generator(seed, *cell)).tokens for cell in group]
            lengths = [self.prompt_length(cell) for cell in group]
            prompts = [tokens[:, :length] for tokens, length in zip(drawn, lengths, strict=True)]
            answers = [tokens[:, length:] for tokens, length in zip(drawn, lengths, strict=True)]
            right = self.score(model, self.stack(prompts, left=True), self.stack(answers, left=False))
            scores.update(zip(group, right.view(len(group), samples).double().mean(1).tolist(), strict=True))
        return {cell: scores[cell] for cell in cells}

    def group_cells(self, cells: list[Cell], samples: int) -> Iterator[list[Cell]]:
        """Groups of cells of about a batch, sorted by answer length, then by prompt length."""
        group: list[Cell] = []
        for cell in sorted(cells, key=lambda cell: (self.answer_length(cell), self.prompt_length(cell))):
            longest = self.answer_length(cell) + max(self.prompt_length(other) for other in (*group, cell))
            if group and (len(group) + 1) * samples * longest > self.options.batch_tokens:
                yield group
                group = []
            group.append(cell)
        yield group

    def stack(self, rows: list[Tensor], left: bool) -> Tensor:
        """Blocks of rows of different lengths, padded on one side to the longest."""
        longest = max(block.shape[1] for block in rows)
        gaps = [longest - block.shape[1] for block in rows]
        sides = [(gap, 0) if left else (0, gap) for gap in gaps]
        return torch.cat([pad(block, side, value=self.pad_token_id) for block, side in zip(rows, sides, strict=True)])

    def score(self, model: Any, prompts: Tensor, answers: Tensor) -> Tensor:
        """Which answers [n, A] the model gives to prompts [n, T]: [n] bool."""
        return score_answers(
            model,
            prompts,
            answers,
            end=self.eos_token_id,
            pad=self.pad_token_id,
            method=self.options.method,
            batch_tokens=self.options.batch_tokens,
        )


def mean_percent(scores: dict[Cell, float], keep: Callable[[Cell], bool]) -> float:
    """The mean over the selected cells in percent; NaN if there are none."""
    kept = [score for cell, score in scores.items() if keep(cell)]
    return 100 * sum(kept) / len(kept) if kept else float("nan")


@dataclass(frozen=True, kw_only=True)
class LengthOptions(PromptOptions):
    """Evaluated sizes."""

    stride: Positive = 1
    """Evaluate only the sizes stride, 2 stride, 3 stride, ...; 1 evaluates all."""

    # not annotated: an annotation would make it a setting
    unit = ""
    """The unit of sizes: subclasses have the settings trained_UNIT and tested_UNIT."""

    def __post_init__(self) -> None:
        trained = f"trained_{self.unit}, {self.trained}"
        if self.tested < self.trained:
            raise ValueError(f"tested_{self.unit} is {self.tested}, less than {trained}; evaluation covers both.")
        if self.stride > self.trained:
            raise ValueError(f"stride is {self.stride}, more than {trained}; it would skip all trained sizes.")

    @property
    def trained(self) -> int:
        return getattr(self, f"trained_{self.unit}")

    @property
    def tested(self) -> int:
        return getattr(self, f"tested_{self.unit}")

    @property
    def sizes(self) -> list[int]:
        """The sizes to evaluate, up to the largest."""
        return list(range(self.stride, self.tested + 1, self.stride))


class LengthTask(PromptTask):
    """Scored by exact match at each size, in and out of distribution."""

    options: LengthOptions
    headline = "exact_match_outside"
    metrics = (EXACT_MATCH,)

    def evaluate(self, model: Any, seed: int, share: float = 1.0) -> Evaluation:
        sizes, unit = self.options.sizes, self.options.unit
        scores = self.score_cells(model, [(size,) for size in sizes], seed, share)
        curve = Curve(
            title=f"exact match against {unit}",
            x_label=unit,
            x=[float(size) for size in sizes],
            y_label="exact match",
            y=[scores[size,] for size in sizes],
        )
        return Evaluation(metrics=self.means(scores), curves=[curve])

    def means(self, scores: dict[Cell, float]) -> dict[str, float]:
        """Mean scores in per cent over cells of trained sizes, and over all others."""
        trained = self.options.trained
        return {
            "exact_match_inside": mean_percent(scores, lambda cell: max(cell) <= trained),
            "exact_match_outside": mean_percent(scores, lambda cell: max(cell) > trained),
        }
