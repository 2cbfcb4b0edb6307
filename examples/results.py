"""Seeds, tables and files of the examples that compare encodings."""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

import equitape


def parse(description, arguments, **defaults):
    """The options all comparisons share, and a number for each further default."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--kinds", nargs="+", required=False, default=None)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--out", type=Path)
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    return parser.parse_args(arguments)


def compare(kinds, seeds, run):
    """run(kind, seed) -> {column: number} for every kind and seed; returns {kind: [one such row per seed]}."""
    found = {}
    for kind in kinds:
        found[kind] = []
        for seed in seeds:
            start = time.perf_counter()
            torch.manual_seed(seed)
            row = run(kind, seed)
            found[kind].append({**row, "seed": seed, "seconds": round(time.perf_counter() - start, 1)})
            print(kind, json.dumps(found[kind][-1]), flush=True)
    return found


def table(found):
    """Markdown: mean and standard deviation over seeds."""
    columns = [name for name in next(iter(found.values()))[0] if name not in ("seed", "seconds")]
    lines = [f"| encoding | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    for kind, rows in found.items():
        cells = []
        for column in columns:
            numbers = [row[column] for row in rows]
            spread = f" ± {statistics.stdev(numbers):.1f}" if len(numbers) > 1 else ""
            cells.append(f"{statistics.mean(numbers):.1f}{spread}")
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return "\n".join(lines)


def report(found, chosen, command):
    """Print the table, and write everything to a file, to which a later call with other kinds adds."""
    print(table(found))
    if chosen.out is not None:
        if chosen.out.exists():
            found = {**json.loads(chosen.out.read_text())["results"], **found}
        settings = {key: str(value) for key, value in vars(chosen).items() if key not in ("out", "data", "kinds")}
        versions = {"equitape": equitape.__version__, "torch": torch.__version__}
        content = {"command": command, "settings": settings, "versions": versions, "results": found}
        chosen.out.write_text(json.dumps(content, indent=1) + "\n")
    return found
