"""Flip-flop language: recall the last written bit and ignore everything in between.

A sequence is made of pairs of an instruction and a bit: `w 1 i 0 i 1 r 1`. The first instruction writes, the last
reads; the bit after a read is the one written last, all others are random. Shapes: n sequences, T tokens, P = T / 2
pairs.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from ..runs.results import ERROR
from ..settings import Ge, Share
from .base import IGNORED, Curve, Evaluation, evaluation_generator, require_order, scale_samples
from .states import StateOptions, StateTask, judge

ZERO, ONE, WRITE, READ, IGNORE, PAD = range(6)


@dataclass(frozen=True, kw_only=True)
class FlipFlopOptions(StateOptions):
    """Lengths, and how often bits are ignored."""

    length: Annotated[int, Ge(4)] = 512
    """Tokens of a sequence, two for each instruction."""
    ignore: Share = 0.8
    """Fraction of ignore instructions, in distribution; the others write or read, equally often."""
    sparse_ignore: Share = 0.98
    """The same fraction in the sparse tail, where bits must be remembered for long."""
    dense_ignore: Share = 0.1
    """The same fraction in the dense tail, where bits change often."""
    loss: Literal["reads", "all"] = "reads"
    """Tokens in the training loss: "reads", the predictable bits, or "all"."""

    def __post_init__(self) -> None:
        if self.length % 2:
            raise ValueError(f"length is {self.length}; it must be even: an instruction and a bit.")
        require_order(dense_ignore=self.dense_ignore, ignore=self.ignore, sparse_ignore=self.sparse_ignore)


class FlipFlop(StateTask):
    """Scored by wrong bits after reads: in distribution, and in a sparse and a dense tail."""

    name = "flip_flop"
    idea = "read back the bit written last; bits are kept longer, or change faster, than in training"
    options_class = FlipFlopOptions
    headline = "error_outside_sparse"
    higher_is_better = False
    metrics = (ERROR,)
    vocab_size = 6
    pad_token_id = PAD
    options: FlipFlopOptions

    def lengths(self) -> tuple[int, int]:
        return self.options.length, self.options.length

    def draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        tokens, labels = make_sequences(count, self.options.length, self.options.ignore, generator)
        return tokens, tokens if self.options.loss == "all" else labels

    def evaluate(self, model: Any, seed: int, share: float = 1.0) -> Evaluation:
        options = self.options
        metrics, curves = {}, []
        # the numbers of sequences in the proportion of the benchmark's own test sets: sparse ones hold few reads
        for place, (name, ignore, portion) in enumerate(
            (
                ("inside", options.ignore, 1.0),
                ("outside_sparse", options.sparse_ignore, 10.0),
                ("outside_dense", options.dense_ignore, 0.25),
            )
        ):
            count = max(1, round(portion * scale_samples(options.samples, share)))
            tokens, labels = make_sequences(count, options.length, ignore, evaluation_generator(seed, place))
            wrong = 1 - judge(model, tokens, labels, options.batch_tokens)
            metrics[f"error_{name}"] = 100 * float(wrong.nanmean())
            if name == "outside_sparse":
                curves.append(error_by_distance(tokens, wrong))
        return Evaluation(metrics=metrics, curves=curves)


def make_sequences(count: int, length: int, ignore: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens and labels [n, T]; only bits after a read have labels."""
    pairs = length // 2
    chance = torch.rand(count, pairs, generator=generator)
    instructions = torch.full((count, pairs), IGNORE)
    instructions[chance >= ignore] = WRITE
    instructions[chance >= (1 + ignore) / 2] = READ
    instructions[:, 0], instructions[:, -1] = WRITE, READ
    bits = torch.randint(ZERO, ONE + 1, (count, pairs), generator=generator)
    reads = instructions == READ
    bits = torch.where(reads, bits.gather(1, last_write(instructions)), bits)
    tokens = torch.stack((instructions, bits), dim=2).flatten(1)
    labels = torch.stack((torch.full_like(bits, IGNORED), torch.where(reads, bits, IGNORED)), dim=2).flatten(1)
    return tokens, labels


def last_write(instructions: Tensor) -> Tensor:
    """For every pair, the index [n, P] of the last write up to it."""
    place = torch.arange(instructions.shape[1])
    return torch.where(instructions == WRITE, place, 0).cummax(1).values


def error_by_distance(tokens: Tensor, wrong: Tensor) -> Curve:
    """Errors [n, T] of reads by how many pairs ago the bit was written: means over distances from 2^k up to 2^(k+1)."""
    instructions = tokens[:, 0::2]
    distance = torch.arange(instructions.shape[1]) - last_write(instructions)
    reads = instructions == READ
    scale, errors = distance[reads].double().log2().floor(), wrong[:, 1::2][reads]
    scales = scale.unique().tolist()
    return Curve(
        title="read error against pairs since the write, sparse tail",
        x_label="pairs since the write",
        x=[2**power for power in scales],
        y_label="error",
        y=[float(errors[scale == power].mean()) for power in scales],
    )
