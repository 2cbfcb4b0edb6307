"""What a standalone attention layer costs next to the decoder's, on a CPU that may be busy.

The two layers of `equitape bench --workload attention` run in turn with the same weights and inputs, and the processor
time of each run counts, which other programs lengthen less than the time on the clock. Printed: the median of the
ratios of neighbouring runs, and its 95 % interval (of the sign test).

python benchmarks/standalone.py --output standalone.json
"""

import argparse
import json
import math
import statistics
import time
from pathlib import Path

import torch

from equitape.bench.parts import AttentionPart, StandalonePart
from equitape.bench.rows import environment
from equitape.bench.shapes import SHAPES


def prepare(cls, kind, shape, hidden, backward):
    """A function that runs a layer once and returns its milliseconds of processor time."""
    torch.manual_seed(0)
    part = cls(shape, kind, "sdpa", hidden.shape[1], projections=True)
    state = part.initial_state(hidden)

    def run():
        start = time.process_time()
        with torch.set_grad_enabled(backward):
            outputs = part(hidden, state)
            if backward:
                torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
        return 1e3 * (time.process_time() - start)

    return run


def compare(kind, shape, hidden, backward, runs):
    """Median milliseconds of both layers, the median ratio and its interval."""
    decoder, standalone = (prepare(cls, kind, shape, hidden, backward) for cls in (AttentionPart, StandalonePart))
    for _ in range(3):
        decoder(), standalone()
    pairs = []
    for index in range(runs):
        if index % 2:
            pairs.append((decoder(), standalone()))
        else:
            pairs.append((standalone(), decoder())[::-1])
    ratios = sorted(after / before for before, after in pairs)
    reach = math.ceil(0.98 * math.sqrt(runs))
    return {
        "decoder": statistics.median(before for before, _ in pairs),
        "standalone": statistics.median(after for _, after in pairs),
        "ratio": statistics.median(ratios),
        "from": ratios[max(0, runs // 2 - reach)],
        "to": ratios[min(runs - 1, runs // 2 + reach)],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--output", type=Path, help="add to this JSON file")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    shape = SHAPES[chosen.shape]
    hidden = torch.randn(chosen.batch, chosen.length, shape.hidden_size)
    rows = []
    for kind in ("rope", "tape"):
        for backward in (False, True):
            found = compare(kind, shape, hidden, backward, chosen.runs)
            rows.append({"encoding": kind, "backward": backward, **found})
            what = "forward and backward" if backward else "forward"
            print(
                f"| {shape.name}, {chosen.batch} x {chosen.length}, {kind}, {what} | {found['decoder']:.3f} ms "
                f"| {found['standalone']:.3f} ms | {found['ratio']:.3f} ({found['from']:.3f} to {found['to']:.3f}) |",
                flush=True,
            )
    if chosen.output is not None:
        before = json.loads(chosen.output.read_text()) if chosen.output.exists() else []
        settings = {key: value for key, value in vars(chosen).items() if key != "output"}
        entry = {**environment(torch.device("cpu")), "settings": settings, "rows": rows}
        chosen.output.write_text(json.dumps([*before, entry], indent=1) + "\n")


if __name__ == "__main__":
    main()
