"""Read one very long text in chunks through the cache: time and memory against length, and the loss at its end.

Only the last tokens get logits, so memory is that of the cache and of one chunk.
"""

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from ..model import EquitapeForCausalLM
from ..tasks.perplexity import head_losses

CHUNK, LAST = 65536, 8192


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One model that has read a text."""

    name: str
    encoding: str
    tokens: int
    chunk: int
    last: int
    """Tokens at the end whose loss was measured."""
    perplexity: float
    seconds: float
    cache_gib: float
    """Of the cache at the end."""
    peak_gib: float | None
    """Of the device's memory; None on a CPU."""
    lengths: list[int] = field(default_factory=list)
    """Tokens read after each chunk."""
    chunk_seconds: list[float] = field(default_factory=list)
    perplexities: list[float] = field(default_factory=list)
    """After each chunk, of the last tokens until then."""

    @property
    def microseconds_per_token(self) -> list[float]:
        """Of the tokens of each chunk."""
        starts = [0, *self.lengths[:-1]]
        pairs = zip(self.chunk_seconds, starts, self.lengths, strict=True)
        return [1e6 * seconds / (end - start) for seconds, start, end in pairs]

    def to_dict(self) -> dict[str, Any]:
        """For results files."""
        return {**asdict(self), "microseconds_per_token": self.microseconds_per_token}


@torch.no_grad()
def read_text(
    model: EquitapeForCausalLM,
    tokens: Tensor,
    name: str,
    *,
    chunk: int = CHUNK,
    last: int = LAST,
    seconds: float | None = None,
    show: Callable[[Reading], None] | None = None,
) -> Reading:
    """Read tokens [N] in chunks and score the last ones after each chunk.

    seconds: end before a chunk with which reading would take longer, if it is as slow as the chunk before.
    show: called after each chunk with the reading so far.
    """
    device = model.device
    if not 0 < last < len(tokens):
        raise ValueError(f"last is {last}; it must be at least 1 and below the {len(tokens)} tokens of the text.")
    tokens = tokens.to(device)[None]
    total = tokens.shape[1]
    cache = DynamicCache(config=model.config)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    assert isinstance(model.config.encoding, dict)
    kind = model.config.encoding["kind"]
    losses = torch.zeros(0, device=device)
    lengths: list[int] = []
    times: list[float] = []
    perplexities: list[float] = []

    def so_far() -> Reading:
        size = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        return Reading(
            name=name,
            encoding=kind,
            tokens=lengths[-1],
            chunk=chunk,
            last=last,
            perplexity=perplexities[-1],
            seconds=sum(times),
            cache_gib=size / 2**30,
            peak_gib=torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None,
            lengths=list(lengths),
            chunk_seconds=list(times),
            perplexities=list(perplexities),
        )

    for start in range(0, total, chunk):
        if seconds is not None and times and sum(times) + times[-1] > seconds:
            break
        end = min(start + chunk, total)
        began = now(device)
        hidden = model.model(input_ids=tokens[:, start:end], past_key_values=cache, use_cache=True).last_hidden_state
        times.append(now(device) - began)
        lengths.append(end)
        # the state of token i predicts token i + 1; that of the last token of all predicts nothing
        first = max(start, end - last - 1)
        wanted = tokens[0, first + 1 : end + 1]
        new = head_losses(model.lm_head, hidden[0, first - start :][: len(wanted)], wanted)
        losses = torch.cat((losses, new))[-last:]
        perplexities.append(math.exp(float(losses.double().mean())))
        if show is not None:
            show(so_far())
        del hidden
    return so_far()


def now(device: torch.device) -> float:
    """Seconds, once the device has done everything."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
