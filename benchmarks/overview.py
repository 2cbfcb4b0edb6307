"""The picture of the README: three results of docs/results side by side.

    python benchmarks/overview.py docs/results/overview.png

Retrieval and addition beyond the trained length, and the extension of a pretrained model.
"""

import argparse
import json
from math import isnan, nan
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib.pyplot as plt

from equitape.report.style import ENCODINGS

RESULTS = Path(__file__).parent.parent / "docs/results"
COLOURS = {kind: colour for kind, (colour, _) in ENCODINGS.items()}
GRAY, GREEN = "#8a8f98", "#1a7f5a"


def metrics(comparison: str, label: str) -> list[dict[str, float]]:
    """The metrics of every finished run of one encoding."""
    runs = json.loads((RESULTS / comparison / "results.json").read_text())["runs"]
    return [run["evaluation"]["metrics"] for run in runs if run["label"] == label and run["status"] == "done"]


def draw_lines(panel: Any, lines: list[tuple[str, list[float], str, int]], places: list[str]) -> None:
    """Lines with their names at the end; the last number of each moves its name up by so many points."""
    for name, values, colour, shift in lines:
        known = [place for place, value in enumerate(values) if not isnan(value)]
        panel.plot(known, [values[place] for place in known], color=colour, marker="o", markersize=3.5, linewidth=1.8)
        panel.annotate(
            name,
            (len(values) - 1, values[-1]),
            xytext=(6, shift),
            textcoords="offset points",
            color=colour,
            va="center",
            fontsize=8.5,
        )
    panel.set_xticks(range(len(places)), places)
    panel.set_xlim(-0.2, len(places) + 0.15)
    panel.set_ylim(-9, 105)


def draw_retrieval(panel: Any) -> None:
    """Values found at 1, 2, 4 and 8 times the trained length."""
    keys = ["exact_match_inside", *(f"exact_match_outside_{factor}x" for factor in (2, 4, 8))]
    labels = [
        ("PaTH, one seed", "path", COLOURS["path"], 5),
        ("TAPE 2", "tape2, jumps", COLOURS["tape2"], -10),
        ("RoPE, rotated\nvalues", "rope, half decay, half values, jumps", GREEN, 0),
        ("RoPE", "rope, half decay, jumps", COLOURS["rope"], 8),
        ("CoPE, FIRE, FoX,\nNoPE, TAPE as\npublished", "cope", GRAY, -15),
        ("", "fire, jumps", GRAY, 0),
        ("", "fox", GRAY, 0),
        ("", "tape, jumps", GRAY, 0),
        ("", "nope", GRAY, 0),
    ]
    lines = []
    for name, label, colour, shift in labels:
        found = metrics("beyond-retrieval", label)
        lines.append((name, [fmean(run[key] for run in found) for key in keys], colour, shift))
    draw_lines(panel, lines, ["256\n(trained)", "512", "1,024", "2,048"])
    panel.set_xlim(-0.2, 4.5)
    panel.set_xlabel("tokens in which 8 values are hidden")
    panel.set_title("Retrieval from scratch: % of values found", fontsize=10)


def draw_addition(panel: Any) -> None:
    """Exact match over the grid of operand lengths: with jumps and growing queries, and below, lighter, without."""
    both, neither = "beyond-addition-20", "addition-20"
    rows = [
        ("TAPE 2", both, "tape2, jumps", "tape2"),
        ("TAPE as\npublished", both, "tape, jumps", "tape"),
        ("RoPE", both, "rope, half decay, jumps", "rope"),
        ("FIRE", both, "fire, jumps", "fire"),
        ("NoPE", both, "nope", "nope"),
        ("FIRE", neither, "fire", "fire"),
        ("NoPE", neither, "nope", "nope"),
        ("TAPE as\npublished", neither, "tape", "tape"),
        ("RoPE", neither, "rope", "rope"),
    ]
    # a gap between the two kinds of training
    places = [-place - (comparison == neither) / 2 for place, (_, comparison, _, _) in enumerate(rows)]
    for place, (_, comparison, label, kind) in zip(places, rows, strict=True):
        values = [run["exact_match_grid"] for run in metrics(comparison, label)]
        panel.barh(place, fmean(values), color=COLOURS[kind], height=0.7, alpha=0.85 if comparison == both else 0.4)
        panel.plot(values, [place] * len(values), "o", color="black", markersize=2.5)
        panel.annotate(
            f"{fmean(values):.1f}",
            (max(values), place),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=8.5,
        )
    panel.set_yticks(places, [name for name, *_ in rows])
    panel.set_xlim(0, 88)
    panel.axvline(25, color="black", linewidth=0.8, linestyle=":")
    panel.text(
        87, (places[5] + places[8]) / 2, "neither,\n4,000 steps", ha="right", va="center", color=GRAY, fontsize=8.5
    )
    panel.text(87, places[4], "jumps, growth,\n8,000 steps", ha="right", va="center", color=GRAY, fontsize=8.5)
    panel.set_xlabel("% right of all pairs of 1 to 40 digits;\n25 = perfect on trained lengths only")
    panel.set_title("Addition, trained to 20 digits, tested to 40", fontsize=10)


def draw_extension(panel: Any) -> None:
    """Passkeys found by SmolLM2-135M after `equitape extend --to 65536`: means over seeds."""
    lengths = (8192, 16384, 32768, 65536, 131072)
    columns, other = (read_reports(folder) for folder in ("extend-smollm2-seeds", "extend-smollm2-ways"))
    seeds = {name: tasks["passkey"]["metrics"] for name, tasks in columns.items()}
    blocks = {name: (tasks["passkey"]["model"]["encoding"] or {}).get("layers") for name, tasks in columns.items()}
    own = [found for name, found in seeds.items() if blocks[name] is None and name != "original"]
    with_tape = [found for name, found in seeds.items() if blocks[name] == "all"]
    names = [
        ("with TAPE 2,\nthree seeds", with_tape, COLOURS["tape2"], -11),
        ("extended,\nthree seeds", own, GREEN, 9),
        ("YaRN,\nuntrained", [other["yarn"]["passkey"]["metrics"]], GRAY, 12),
        ("as released", [seeds["original"]], COLOURS["rope"], -8),
    ]
    lines = []
    for name, runs, colour, shift in names:
        keys = [f"exact_match_{length}" for length in lengths]
        lines.append((name, [fmean(each.get(key, nan) for each in runs) for key in keys], colour, shift))
    draw_lines(panel, lines, ["8k", "16k", "32k", "64k\n(asked for)", "128k"])
    panel.set_xlim(-0.2, 5.2)
    panel.set_xlabel("tokens of the prompt")
    panel.set_title("SmolLM2-135M to 64k: % of passkeys found", fontsize=10)


def read_reports(folder: str) -> dict[str, Any]:
    """The reports of an extension by column and task."""
    return json.loads((RESULTS / folder / "results.json").read_text())["reports"]


def main() -> None:
    """Draw the three panels."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    figure, panels = plt.subplots(1, 3, figsize=(12.6, 3.7), layout="constrained")
    for panel, draw in zip(panels, (draw_retrieval, draw_addition, draw_extension), strict=True):
        draw(panel)
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(labelsize=8.5)
    figure.savefig(out, dpi=150, metadata={"Software": None})


if __name__ == "__main__":
    main()
