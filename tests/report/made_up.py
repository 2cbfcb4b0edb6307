"""Results of a comparison that never ran, with every kind of run in it."""

import math
import random


def make_run(label, seed, quality, status="done", note=""):
    """A run whose exact match falls outside the trained quarter and whose perplexity grows with length."""
    draw = random.Random(f"{label}{seed}")
    rows = list(range(2, 41, 2))
    log = [[step, 2.6 * math.exp(-step / (300 * quality)) + 0.02 + 0.05 * draw.random()] for step in range(5, 2001, 5)]
    run = {
        "label": label,
        "encoding": {"kind": label.split(",")[0]},
        "seed": seed,
        "status": status,
        "note": note,
        "parameters": 4_812_032 + len(label) * 1000,
        "steps": 2000,
        "trained_tokens": 16_384_000,
        "seconds": 312.4 + seed,
        "tokens_per_second": 52_400.0 - 900 * len(label),
        "peak_mib": None,
        "evaluate_seconds": 40.0,
        "log": log,
        "evaluation": None,
        "environment": {"commit": None, "side_by_side": 1 + seed},
    }
    if status != "done":
        return {**run, "log": [*log[:40], [205, None]] if status == "nan" else []}

    def score(left, right):
        return min(1.0, max(0.0, 1.2 - max(left, right) / (20 * quality))) if max(left, right) > 20 else 1.0

    grid = [[min(1.0, score(left, right) * (1 - 0.05 * draw.random())) for right in rows] for left in rows]
    outside = [
        cell
        for left, row in zip(rows, grid, strict=True)
        for right, cell in zip(rows, row, strict=True)
        if max(left, right) > 20
    ]
    everything = [cell for row in grid for cell in row]
    lengths = [512, 1024, 2048, 4096]
    return {
        **run,
        "evaluation": {
            "metrics": {
                "exact_match": 100 * sum(everything) / len(everything),
                "exact_match_inside": 100 * (1 - 0.01 * draw.random()),
                "exact_match_outside": 100 * sum(outside) / len(outside),
                "digits": 0.5,
            },
            "heat_maps": [
                {
                    "title": "exact match",
                    "row_label": "digits of the first operand",
                    "rows": rows,
                    "column_label": "digits of the second operand",
                    "columns": rows,
                    "values": grid,
                }
            ],
            "curves": [
                {
                    "title": "perplexity against length",
                    "x_label": "tokens",
                    "x": lengths,
                    "y_label": "perplexity",
                    "y": [6 * (1 + (length / 512 - 1) * (1.8 - quality)) + 0.2 * draw.random() for length in lengths],
                }
            ],
        },
    }


def make_results():
    """Five encodings and three seeds; one run broke, one failed, one is missing."""
    qualities = {"rope": 1.05, "nope": 1.3, "fire": 1.28, "tape": 1.55, "tape, no carry": 1.1}
    runs = [make_run(label, seed, quality) for label, quality in qualities.items() for seed in (0, 1, 2)]
    runs[2] = make_run("rope", 2, 1.05, "nan", "The loss stopped being a number at step 205.")
    runs[5] = make_run("nope", 2, 1.3, "failed", "Out of memory <at> step 3 | see log.")
    runs[14] = make_run("tape, no carry", 2, 1.1, "missing", "Not run yet.")
    return {
        "name": "addition-20",
        "recipe": {
            "name": "addition-20",
            "description": "Sums & more.",
            "seeds": [0, 1, 2],
            "task": {"name": "addition", "trained_digits": 20},
        },
        "task": {
            "name": "addition",
            "idea": "sums of two numbers, least digit first",
            "headline": "exact_match",
            "higher_is_better": True,
            "trained_length": 1024,
            "tested_length": 4096,
        },
        "claims": {"rope": {"exact_match": 26.12}, "tape": {"exact_match": 41.42}, "randpe": {"exact_match": 26.12}},
        "claims_source": "arXiv 2501.00712, figure 3",
        "environment": {
            "equitape": "0.1.0",
            "torch": "2.13.0",
            "transformers": "5.22.2",
            "accelerate": "1.15.0",
            "python": "3.12.1",
            "device": "cpu",
            "processor": "x86_64, 2 cores",
            "commit": "unknown",
            "date": "2026-01-02T03:04:05Z",
        },
        "runs": runs,
    }
