"""Read a million tokens in chunks through the cache, with TAPE and with RoPE.

    python benchmarks/long_reading.py ADAPTER --base SmolLM2-135M-Instruct --data books/train --tokens 1048576 \
        --output reading.json --plot reading.png

The text is the documents of --data, joined, from their beginning; from its start again if it is too short. Both models
are the package's decoder: the adapter, and --rope-adapter or the base with its own positions (--rope-tokens of them, 0
for none). Without an adapter (give "tape"), the base gets TAPE untrained, which computes what RoPE does at the cost of
TAPE.
"""

import argparse
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # before torch is imported
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import torch
from torch import Tensor
from transformers import DynamicCache

from equitape import EquitapeForCausalLM, adapt, load_adapter
from equitape.data.tokens import build_tokens
from equitape.nn.continued import is_right
from equitape.pretrained.loading import choose_device, tokenizer_of
from equitape.report.charts import Line, LinePanel, line_figure
from equitape.report.style import series_styles
from equitape.runs.environment import describe_environment
from equitape.runs.files import write_json
from equitape.tasks.perplexity import head_losses

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


def write_reading_plot(readings: Sequence[Reading], path: Path) -> None:
    """Time per token against the tokens read before, one line per model."""
    styles = series_styles({each.name: each.encoding for each in readings})
    lines = [
        Line(label=each.name, style=styles[each.name], x=each.lengths, y=each.microseconds_per_token)
        for each in readings
    ]
    panel = LinePanel(lines=lines, x_label="tokens read", y_label="microseconds per token", zero=True)
    with line_figure([panel]) as figure:
        figure.savefig(path, dpi=150)


def check_kernel(model, device):
    """End before a mask of chunk times tokens fills the memory."""
    config = model.config
    heads, widths = (
        (config.num_attention_heads, config.num_key_value_heads),
        (config.key_cache_dims[0], config.value_cache_dims[0]),
    )
    if device.type == "cuda" and not is_right(device, model.dtype, heads, widths):
        raise SystemExit(f"No kernel here continues a cache of {model.dtype} with heads {heads} and widths {widths}.")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("adapter", help='folder of an adapter with TAPE, or "tape"')
    parser.add_argument("--base", required=True)
    parser.add_argument("--data", required=True, nargs="+", help="text: files, folders or archives")
    parser.add_argument("--tokens", type=int, default=2**20)
    parser.add_argument("--rope-adapter", help="folder of an adapter without TAPE; the base itself if not given")
    parser.add_argument("--rope-tokens", type=int, help="for RoPE to read; the same if not given")
    parser.add_argument("--chunk", type=int, default=CHUNK)
    parser.add_argument("--last", type=int, default=LAST, help="tokens at the end whose perplexity is printed")
    parser.add_argument("--seconds", type=float, help="end each reading before it takes longer")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--plot", type=Path, help="plot to write")
    given = parser.parse_args()
    device = choose_device()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    text = build_tokens(given.data, tokenizer_of(given.base)).joined()
    readings, environment = [], describe_environment()
    wanted = {"TAPE": given.tokens, "RoPE": given.tokens if given.rope_tokens is None else given.rope_tokens}
    for name, tokens in wanted.items():
        if not tokens:
            continue
        folder = given.rope_adapter if name == "RoPE" else given.adapter
        if folder in (None, "tape"):
            model = adapt(given.base, "full" if name == "RoPE" else "tape", dtype=dtype)
        else:
            model = load_adapter(given.base, folder, dtype=dtype)
        model.requires_grad_(False).to(device)
        check_kernel(model, device)
        # kernels are loaded and compiled before anything is timed
        read_text(model, text[: min(4 * given.last, len(text))], "warm-up", chunk=given.last, last=min(64, given.last))
        row = text.repeat(-(-tokens // len(text)))[:tokens]

        def keep(reading, done=tuple(readings)):
            # written after each chunk: what is measured is kept if memory or time ends
            print(
                f"{reading.name}: {reading.tokens:,} tokens read, the last chunk in {reading.chunk_seconds[-1]:.2f} s, "
                f"perplexity of the last {given.last:,}: {reading.perplexity:.2f}",
                flush=True,
            )
            if given.output:
                content = {"environment": environment, "readings": [each.to_dict() for each in (*done, reading)]}
                write_json(given.output, content)

        reading = read_text(model, row, name, chunk=given.chunk, last=given.last, seconds=given.seconds, show=keep)
        peak = "" if reading.peak_gib is None else f", peak {reading.peak_gib:.1f} GiB"
        print(
            f"{name}: {reading.tokens:,} tokens in {reading.seconds:.1f} s, perplexity of the last {given.last:,}: "
            f"{reading.perplexity:.2f}; cache {reading.cache_gib:.1f} GiB{peak}",
            flush=True,
        )
        readings.append(reading)
        del model
    if given.plot:
        write_reading_plot(readings, given.plot)


if __name__ == "__main__":
    main()
