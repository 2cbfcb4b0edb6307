"""Runs of `equitape adapt` side by side: a table of perplexities before and after, and a picture.

    python benchmarks/extension.py docs/results/extension-smollm2/*.json --plot docs/results/extension-smollm2.png

Takes the results.json of each run that ended well, in the order given. "before" is the base as it is; the method theta
has its own, since it changes the base's function before any training.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from equitape.report.charts import Line, LinePanel, line_plot
from equitape.report.style import series_styles

Runs = dict[str, dict[str, Any]]


def perplexities(run: dict[str, Any], data: str, when: str) -> dict[int, float]:
    """By length."""
    return {entry["length"]: entry[f"perplexity_{when}"] for entry in run["perplexity"] if entry["data"] == data}


def lines_of(runs: Runs, data: str) -> dict[str, dict[int, float]]:
    """The base once, every method after training."""
    plain = min(runs.values(), key=lambda run: run["method"].startswith("theta"))
    after = {name: perplexities(run, data, "after") for name, run in runs.items()}
    return {"before": perplexities(plain, data, "before"), **after}


def table(runs: Runs) -> str:
    """Markdown: what each run trained and cost, then a table of perplexities for each text."""
    texts = list(dict.fromkeys(entry["data"] for run in runs.values() for entry in run["perplexity"]))
    rows = [
        "| method | trained weights | learning rate | tokens seen | tokens/s | peak memory |",
        "|---|---|---|---|---|---|",
    ]
    for name, run in runs.items():
        trained, made = run["trained"], run["run"]
        rows.append(
            f"| {name} | {trained['parameters']:,} ({trained['share']:.2%}) | {run['train']['learning_rate']:g} "
            f"| {made['tokens']:,} | {made['tokens_per_second']:,.0f} | {made['peak_mib']:,.0f} MiB |"
        )
    for data in texts:
        lines = lines_of(runs, data)
        lengths = list(lines["before"])
        rows += ["", f"Perplexity of {data}:", "", f"| | {' | '.join(f'{length:,}' for length in lengths)} |"]
        rows.append("|---" * (len(lengths) + 1) + "|")
        rows += [f"| {name} | {' | '.join(f'{line[at]:.2f}' for at in lengths)} |" for name, line in lines.items()]
    return "\n".join(rows)


def draw(runs: Runs, path: Path) -> None:
    """Perplexity against length, a panel for each text."""
    texts = list(dict.fromkeys(entry["data"] for run in runs.values() for entry in run["perplexity"]))
    kinds = {name: "tape" if run["method"].startswith("tape") else "rope" for name, run in runs.items()}
    styles = series_styles({"before": None, **kinds})
    panels = [
        LinePanel(
            title=data,
            x_label="tokens read at once",
            y_label="perplexity",
            x_log=True,
            y_log=True,
            lines=[
                Line(label=name, style=styles[name], x=list(line), y=list(line.values()))
                for name, line in lines_of(runs, data).items()
            ],
        )
        for data in texts
    ]
    plot = line_plot("extension", "Perplexity before and after training", panels, alt="", size=(5.2, 3.8))
    path.write_bytes(plot.png)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path, help="results.json of each run; its file or folder names it")
    parser.add_argument("--plot", type=Path, help="PNG file to draw into")
    given = parser.parse_args()
    runs = {
        path.stem if path.stem != "results" else path.parent.name: json.loads(path.read_text())
        for path in given.results
    }
    print(table(runs))
    if given.plot:
        draw(runs, given.plot)


if __name__ == "__main__":
    main()
