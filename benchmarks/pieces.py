"""What each piece of TAPE costs in a model with its own attention call, next to the call itself.

python benchmarks/pieces.py --output pieces.json
python benchmarks/pieces.py --encoding 'tape complex_mixing=true normalize=true'
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention

from equitape.bench.rows import environment
from equitape.bench.subjects import parse_subject
from equitape.nn import PositionalLayer


def milliseconds(call, device, runs):
    """Median time of a call, after a warm-up."""
    times = []
    for index in range(runs + 3):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if index >= 3:
            times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoding", default="tape", help="name and options, as for equitape bench; without a decay")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args()
    device = torch.device(chosen.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    width = chosen.heads * chosen.head_dim
    torch.manual_seed(0)
    layer = PositionalLayer(width, chosen.heads, encoding=parse_subject(chosen.encoding).encoding).to(device, dtype)
    shape = (chosen.batch, chosen.heads, chosen.length, chosen.head_dim)
    query, key, value = (torch.randn(shape, device=device, dtype=dtype) for _ in range(3))
    ids = torch.arange(chosen.length, device=device)[None]
    features = torch.randn(chosen.batch, chosen.length, width, device=device, dtype=dtype)
    state = layer.initial_state(ids, dtype).expand(chosen.batch, -1, -1, -1).contiguous()
    wide = layer.widen(value, state)

    def attend(value):
        parts = value.split(chosen.head_dim, -1) if device.type == "cpu" else (value,)
        return torch.cat(
            [scaled_dot_product_attention(query, key, part, is_causal=True, scale=layer.scale) for part in parts], -1
        )

    output = attend(wide)
    _, carried = layer.split(output)
    calls = {
        "initial_state (once per model)": lambda: layer.initial_state(ids, dtype),
        "apply_rotary": lambda: layer.apply_rotary(query, key, state),
        "widen": lambda: layer.widen(value, state),
        "attention, value as it is": lambda: attend(value),
        "attention, value widened": lambda: attend(wide),
        "split": lambda: layer.split(output)[0].transpose(1, 2).flatten(2),
        "update": lambda: layer.update(state, carried, features),
    }
    with torch.no_grad():
        times = {name: milliseconds(call, device, chosen.runs) for name, call in calls.items()}
    for name, taken in times.items():
        print(f"| {name} | {taken:.3f} ms |")
    if chosen.output is not None:
        sizes = {key: value for key, value in vars(chosen).items() if key != "output"}
        about = {**environment(device), "dtype": str(dtype).removeprefix("torch.")}
        chosen.output.write_text(json.dumps({**about, "settings": sizes, "milliseconds": times}, indent=1) + "\n")


if __name__ == "__main__":
    main()
