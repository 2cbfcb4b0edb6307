"""Jumps: in training, position ids skip ahead at random, so that short rows contain long distances.

At each token, with probability `rate`, its id and all later ids increase by a random size. Evaluation uses plain ids.
Related to PoSE (arXiv 2309.10400), which skips once per row, and to RandPE, which draws all ids.

Jumps are drawn when data is loaded: those of example i depend only on the seed and i, so neither the number of
processes nor an interruption changes them. The model counts ids itself, also in packed and padded rows, and adds the
jumps (`position_jumps` of its forward).
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..encodings import PositionalEncoding
from .settings import Jumps


def check_jumps(settings: Jumps | None, encodings: Sequence[PositionalEncoding]) -> None:
    """Raise ValueError if no encoding reads ids, or if one has a fixed number of positions."""
    if settings is None:
        return
    for encoding in encodings:
        if not encoding.reads_ids:
            raise ValueError(
                f"Encoding {encoding.kind!r} does not read position ids, so jumps have no effect; remove them."
            )
        if encoding.bounded_ids:
            raise ValueError(
                f"Encoding {encoding.kind!r} has a fixed number of positions, which jumps exceed; remove them or use a "
                f"rotary encoding."
            )
    if not encodings:
        raise ValueError("jumps need an equitape model; this model does not accept position_jumps.")


def draw_jumps(settings: Jumps, seed: int, row_length: int, numbers: Sequence[int], tokens: Tensor) -> Tensor:
    """Jumps [n, T] of the examples with these indices, whose tokens are [n, T].

    row_length: tokens of the longest example, which may be longer than this batch; 0 if all batches have T tokens.
    """
    num_tokens = tokens.shape[1]
    row_length = max(row_length, num_tokens)
    largest = settings.largest(row_length)
    strides, uniform = _draw(seed, numbers, settings.stretch, row_length)
    falls, sizes = uniform[:, 0], uniform[:, 1]
    drawn = np.floor(largest**sizes if settings.shape == "log" else sizes * largest + 1).astype(np.int64)
    drawn = np.minimum(drawn, largest)
    jumps = np.where(falls < settings.rate, drawn, 0)
    if settings.restart:
        marks = np.isin(tokens.numpy(), settings.restart)
        here = np.arange(num_tokens)
        # tokens since the last mark; the row begins as if one stood before it
        place = here - np.maximum.accumulate(np.where(marks, here, -1), axis=1)
        alike = np.take_along_axis(jumps, np.minimum(place, row_length - 1), axis=1)
        jumps = np.where(marks, drawn[:, :num_tokens], alike)
    jumps = jumps[:, :num_tokens]
    if settings.after:
        follows = np.zeros(tokens.shape, dtype=bool)
        follows[:, 1:] = np.isin(tokens[:, :-1].numpy(), settings.after)
        jumps *= follows
    if settings.total is not None:
        reached = np.minimum(np.cumsum(jumps, axis=1), math.floor(settings.total * row_length))
        jumps = np.diff(reached, axis=1, prepend=0)
    jumps[:, 1:] += strides[:, None]
    return torch.from_numpy(jumps)


def _draw(seed: int, numbers: Sequence[int], stretch: int, row_length: int) -> tuple[np.ndarray, np.ndarray]:
    """What an example's jumps are made of: its stride less one [n], and uniform numbers [n, 2, T]."""
    strides = np.zeros(len(numbers), dtype=np.int64)
    uniform = np.empty((len(numbers), 2, row_length))
    generator = np.random.Philox(key=[seed, 0])
    random, start = np.random.Generator(generator), generator.state
    for row, number in enumerate(numbers):
        # a new generator with this key would take most of the time
        start["state"]["key"][1] = number
        generator.state = start
        if stretch > 1:
            strides[row] = random.integers(stretch)
        random.random(out=uniform[row])
    return strides, uniform
