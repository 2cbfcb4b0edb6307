"""Measure one extended model with several growths of its queries.

    python benchmarks/query_growth.py ADAPTER --base BASE --out growth --growth 0 --growth 0.05 --growth 0.1 \
        --data books/valid --lengths 32768 65536 131072 --samples 20

Training rows are shorter than the length from which queries grow, so the weights do not depend on the growth. Prints
perplexity, passkey and multi-key needles by length. Choose a growth on text that no result is reported on, and with
another --seed than that of the reported prompts.
"""

import argparse
from pathlib import Path

from equitape.evaluation import build_evaluation, evaluate, load_evaluated_model
from equitape.pretrained.loading import choose_device


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("adapter")
    parser.add_argument("--base", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--growth", type=float, action="append", required=True)
    parser.add_argument("--data", help="held-out text for perplexity; not measured if not given")
    parser.add_argument("--lengths", type=int, nargs="+", required=True)
    parser.add_argument("--needle-lengths", type=int, nargs="+", help="the same if not given")
    parser.add_argument("--samples", type=int, default=10, help="prompts per length")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts")
    parser.add_argument("--batch-tokens", type=int)
    given = parser.parse_args()
    prompts = {"samples": given.samples, "seed": given.seed}
    needles = given.needle_lengths or given.lengths
    tasks = {
        "needles": {**prompts, "kinds": ("multikey",), "lengths": needles, "short": min(needles)},
        "passkey": {
            **prompts,
            "samples": max(given.samples // 5, 1),
            "depths": (0.0, 0.25, 0.5, 0.75, 1.0),
            "lengths": given.lengths,
            "short": min(given.lengths),
        },
    }
    if given.data:
        tasks["perplexity"] = {
            "data": (given.data,),
            "lengths": given.lengths,
            "short": min(given.lengths),
            "windows": 1,
            "join": True,
        }
    dtype = "bfloat16" if choose_device().type == "cuda" else "float32"
    for growth in given.growth:
        evaluated = load_evaluated_model(given.adapter, base=given.base, dtype=dtype, label=f"growth {growth:g}")
        config = evaluated.model.config
        config.query_growth = growth
        if config.query_growth_start is None:
            raise SystemExit(f"{given.adapter} was not extended with growing queries, so it has no start for them.")
        for name, options in tasks.items():
            task = build_evaluation(name, dict(options))
            out = given.out / f"growth-{growth:g}" / name
            report = evaluate(evaluated, task, out, resume=True, batch_tokens=given.batch_tokens)
            shown = {key: round(value, 3) for key, value in report["metrics"].items() if key[-1].isdigit()}
            print(f"growth {growth:g}, {name}: {shown}", flush=True)


if __name__ == "__main__":
    main()
