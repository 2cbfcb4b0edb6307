"""Retrieval: several key-value pairs (needles) hidden in noise, then queries for the values of some keys.

A row reads `noise key value noise ... mark key value key value`. The pairs after the mark are the queries; only their
values have labels. Shapes: n rows, T tokens, K needles, Q queries.
"""

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from ..settings import OrOne, Positive
from .base import IGNORED, Curve, Evaluation, HeatMap, evaluation_generator, scale_samples
from .states import StateOptions, StateTask, judge


@dataclass(frozen=True, kw_only=True)
class RetrievalOptions(StateOptions):
    """Sizes of the rows and the lengths to score."""

    length: Positive = 256
    """Tokens of a training row, with needles, noise and queries."""
    factors: Annotated[tuple[Positive, ...], OrOne] = (1, 2, 4, 8)
    """Lengths to score, as multiples of `length`; 1 must be among them."""
    needles: Positive = 8
    """Key-value pairs hidden in a row, at any length; in training from 1 to this."""
    queries: Positive = 4
    """Queries at the end of a scored row, for different keys."""
    noise_tokens: Positive = 64
    """Number of different noise tokens."""
    keys: Positive = 64
    """Number of different keys; the keys of a row are all different."""
    values: Positive = 64
    """Number of different values."""
    depths: Positive = 10
    """Bins of the depth (the place of the needle in the context, from the start to the end) in the heat map."""
    batch_tokens: Positive = 2**16
    """Tokens per evaluation batch."""

    def __post_init__(self) -> None:
        if self.queries > self.needles:
            raise ValueError(f"queries is {self.queries}; it must be at most needles, {self.needles}.")
        if self.needles > self.keys:
            raise ValueError(f"needles is {self.needles}; it must be at most keys, {self.keys}: no key occurs twice.")
        needed = 2 * self.needles + 1 + 2 * self.queries
        if self.length < needed:
            raise ValueError(
                f"length is {self.length}; it must be at least {needed} for needles {self.needles} and queries "
                f"{self.queries}."
            )
        if list(self.factors) != sorted({1, *self.factors}) or len(self.factors) < 2:
            raise ValueError(f"factors is {list(self.factors)}; it must start at 1 and grow, for example [1, 2, 4, 8].")


class Retrieval(StateTask):
    """Scored by the share of queries whose value is the most likely token, at the trained length and at longer ones.

    Tokens: noise from 0, then keys, then values, then the mark before the queries and padding.
    """

    name = "retrieval"
    idea = "find the values of keys hidden in noise; longer rows than in training"
    options_class = RetrievalOptions
    headline = "exact_match_outside"
    options: RetrievalOptions

    def __init__(self, options: Any):
        super().__init__(options)
        self.first_key = options.noise_tokens
        self.first_value = self.first_key + options.keys
        self.mark = self.first_value + options.values
        self.pad_token_id = self.mark + 1
        self.vocab_size = self.mark + 2

    def lengths(self) -> tuple[int, int]:
        return self.options.length, max(self.options.factors) * self.options.length

    def draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Rows with 1 to `needles` needles, whose mark stands anywhere; queries, with repetition, fill the rest.

        Rows with many queries are what teaches the search: with few labels per row it is learnt late or not at all.
        """
        options = self.options
        needles = torch.randint(1, options.needles + 1, (count,), generator=generator)
        shortest, longest = 2 * needles, options.length - 1 - 2 * options.queries
        # an even number of tokens after the mark
        pairs = (torch.rand(count, generator=generator) * ((longest - shortest) // 2 + 1)).long()
        asked = torch.rand(count, options.length // 2, generator=generator) * needles[:, None]
        return self.write(longest - 2 * pairs, needles, asked.long(), options.length, generator)[:2]

    def draw_test(self, count: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Rows to score, with all needles and `queries` different queries: tokens, labels [n, T] and depths [n, Q]."""
        needles, queries = self.options.needles, self.options.queries
        context = torch.full((count,), length - 1 - 2 * queries)
        asked = choose(count, needles, queries, generator)
        return self.write(context, torch.full((count,), needles), asked, length, generator)

    def write(
        self, context: Tensor, needles: Tensor, asked: Tensor, length: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rows with so many tokens before the mark [n], needles [n], and queries for these needles [n, Q].

        Returns tokens and labels [n, T], and the depth of each query's needle [n, Q], from 0 (start) to 1 (end).
        """
        options, count = self.options, len(context)
        most = int(needles.max())
        keys = self.first_key + choose(count, options.keys, most, generator)
        values = self.first_value + torch.randint(0, options.values, (count, most), generator=generator)
        # Sorted places among the first context - needles, then each needle moves the later ones on by a token: no two
        # needles overlap, and all layouts are equally likely. Needles that a row does not have go to column `length`.
        chance = torch.rand(count, length, generator=generator)
        chance[torch.arange(length) >= (context - needles)[:, None]] = 2.0
        order = chance.argsort(1)[:, :most]
        missing = torch.arange(most) >= needles[:, None]
        places = order.masked_fill(missing, length).sort(1).values + torch.arange(most)
        places = places.masked_fill(missing, length)
        tokens = torch.randint(0, options.noise_tokens, (count, length + 2), generator=generator)
        tokens.scatter_(1, places, keys).scatter_(1, places + 1, values)
        tokens.scatter_(1, context[:, None], self.mark)
        answers = values.gather(1, asked)
        where = (context[:, None] + 1 + 2 * torch.arange(asked.shape[1])).clamp(max=length)
        tokens.scatter_(1, where, keys.gather(1, asked)).scatter_(1, where + 1, answers)
        labels = torch.full((count, length + 2), IGNORED).scatter_(1, where + 1, answers)
        depth = places.gather(1, asked) / (context - 2).clamp(min=1)[:, None]
        return tokens[:, :length], labels[:, :length], depth

    def evaluate(self, model: Any, seed: int, share: float = 1.0) -> Evaluation:
        options = self.options
        count = scale_samples(options.samples, share)
        shares, by_depth = [], []
        for factor in options.factors:
            generator = evaluation_generator(seed, factor)
            tokens, labels, depth = self.draw_test(count, factor * options.length, generator)
            right = judge(model, tokens, labels, options.batch_tokens)[labels != IGNORED].view_as(depth)
            shares.append(float(right.mean()))
            by_depth.append(mean_by_bin(right, depth, options.depths))
        metrics = {"exact_match_inside": 100 * shares[0]}
        metrics["exact_match_outside"] = 100 * sum(shares[1:]) / len(shares[1:])
        for factor, score in zip(options.factors[1:], shares[1:], strict=True):
            metrics[f"exact_match_outside_{factor}x"] = 100 * score
        return Evaluation(
            metrics=metrics,
            heat_maps=[
                HeatMap(
                    title="exact match by length and depth",
                    row_label="length in tokens",
                    rows=[factor * options.length for factor in options.factors],
                    column_label="depth of the needle in per cent",
                    columns=[round(100 * (column + 0.5) / options.depths) for column in range(options.depths)],
                    values=by_depth,
                )
            ],
            curves=[
                Curve(
                    title="exact match against length",
                    x_label="length in tokens",
                    x=[float(factor * options.length) for factor in options.factors],
                    y_label="exact match",
                    y=shares,
                )
            ],
        )


def choose(count: int, size: int, number: int, generator: torch.Generator) -> Tensor:
    """Different integers below `size` in random order, [count, number]."""
    return torch.rand(count, size, generator=generator).argsort(1)[:, :number]


def mean_by_bin(right: Tensor, depth: Tensor, bins: int) -> list[float]:
    """The mean of `right` in equal bins of depth from 0 to 1; NaN where a bin is empty."""
    number = (depth * bins).long().clamp(max=bins - 1)
    return [float(right[number == index].mean()) for index in range(bins)]
