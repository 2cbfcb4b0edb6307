"""The picture of the README: three results of docs/results side by side.

    python benchmarks/overview.py docs/results/overview.png

Language modelling beyond the trained length, addition of longer numbers, and the extension of a pretrained model.
"""

import argparse
import json
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib.pyplot as plt

from equitape.report.style import ENCODINGS

RESULTS = Path(__file__).parent.parent / "docs/results"
COLOURS = {kind: colour for kind, (colour, _) in ENCODINGS.items()}
NAMES = {
    "rope": "RoPE",
    "tape": "TAPE",
    "alibi": "ALiBi",
    "cope": "CoPE",
    "xpos": "xPos",
    "fire": "FIRE",
    "nope": "NoPE",
    "randpe": "RandPE",
}


def metrics(comparison: str, label: str) -> list[dict[str, float]]:
    """The metrics of every finished run of one encoding."""
    runs = json.loads((RESULTS / comparison / "results.json").read_text())["runs"]
    return [run["evaluation"]["metrics"] for run in runs if run["label"] == label and run["status"] == "done"]


def draw_books(panel: Any) -> None:
    """Bits per byte at 1, 2, 4 and 8 times the trained length."""
    keys = ["bits_per_byte_1x", *(f"bits_per_byte_outside_{factor}x" for factor in (2, 4, 8))]
    # where lines end too close to one another, labels are moved apart
    shifts = {"xpos": 9, "cope": 0, "alibi": -9}
    for label in ("rope", "tape", "fire", "xpos", "cope", "alibi"):
        found = metrics("lm-books", label)
        values = [fmean(run[key] for run in found) for key in keys]
        panel.plot(range(4), values, color=COLOURS[label], marker="o", markersize=3.5, linewidth=1.8)
        panel.annotate(
            NAMES[label],
            (3, values[-1]),
            xytext=(6, shifts.get(label, 0)),
            textcoords="offset points",
            color=COLOURS[label],
            va="center",
            fontsize=8.5,
        )
    panel.set_xticks(range(4), ["1,024\n(trained)", "2,048", "4,096", "8,192"])
    panel.set_xlim(-0.2, 3.75)
    panel.set_ylim(bottom=1.2)
    panel.set_xlabel("bytes read at once")
    panel.set_title("Books: bits per byte, lower is better", fontsize=10)


def draw_bars(panel: Any, rows: list[tuple[str, float, str]], note: str) -> None:
    """Horizontal bars with their values."""
    for place, (_, value, colour) in enumerate(reversed(rows)):
        panel.barh(place, value, color=colour, height=0.65)
        panel.annotate(
            f"{value:.1f}", (value, place), xytext=(3, 0), textcoords="offset points", va="center", fontsize=8.5
        )
    panel.set_yticks(range(len(rows)), [name for name, _, _ in reversed(rows)])
    panel.set_xlabel(note)
    panel.set_xlim(0, max(value for _, value, _ in rows) * 1.14)


def draw_addition(panel: Any) -> None:
    """Exact match over the grid of operand lengths."""
    labels = ("tape", "rope", "randpe", "nope", "fire")
    rows = [
        (NAMES[label], fmean(run["exact_match_grid"] for run in metrics("addition-20", label)), COLOURS[label])
        for label in labels
    ]
    draw_bars(panel, rows, "% right; 25 = perfect on trained lengths only")
    panel.axvline(25, color="black", linewidth=0.8, linestyle=":")
    panel.set_title("Addition, 20 to 40 digits, higher is better", fontsize=10)


def draw_extension(panel: Any) -> None:
    """Perplexity of books at 16,384 tokens after extending SmolLM2-135M, positions interpolated."""
    methods = {
        "tape": "TAPE",
        "theta": "larger RoPE base",
        "longlora": "LongLoRA",
        "lora": "LoRA",
        "tape+lora": "TAPE + LoRA",
    }
    rows = []
    for method, name in methods.items():
        run = json.loads((RESULTS / f"extension-smollm2/linear/{method}.json").read_text())
        value = next(
            entry["perplexity_after"]
            for entry in run["perplexity"]
            if (entry["data"], entry["length"]) == ("books", 16384)
        )
        rows.append((name, value, COLOURS["tape"] if "tape" in method else "#9db4d6"))
    draw_bars(panel, rows, "perplexity of books at 16,384 tokens")
    panel.set_title("SmolLM2-135M to 16k, lower is better", fontsize=10)


def main() -> None:
    """Draw the three panels."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    figure, panels = plt.subplots(1, 3, figsize=(12.6, 3.5), layout="constrained")
    for panel, draw in zip(panels, (draw_books, draw_addition, draw_extension), strict=True):
        draw(panel)
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(labelsize=8.5)
    figure.savefig(out, dpi=150, metadata={"Software": None})


if __name__ == "__main__":
    main()
