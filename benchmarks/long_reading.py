"""Read a million tokens in chunks through the cache, with TAPE and with RoPE.

    python benchmarks/long_reading.py ADAPTER --base SmolLM2-135M-Instruct --data books/train --tokens 1048576 \
        --output reading.json --plot reading.png

The text is the documents of --data, joined, from their beginning; from its start again if it is too short. Both models
are the package's decoder: the adapter, and --rope-adapter or the base with its own positions (--rope-tokens of them, 0
for none). Without an adapter (give "tape"), the base gets TAPE untrained, which computes what RoPE does at the cost of
TAPE.
"""

import argparse
import os
from pathlib import Path

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import torch

from equitape import adapt, load_adapter
from equitape.bench.reading import CHUNK, LAST, read_text
from equitape.data.tokens import build_tokens
from equitape.nn.continued import is_right
from equitape.pretrained.loading import choose_device, tokenizer_of
from equitape.report.benchmark import write_reading_plot
from equitape.runs.environment import describe_environment
from equitape.runs.files import write_json


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
