"""Seeds, tables and files of the examples that compare encodings."""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

import equitape


def parse(description, arguments, kinds, data=False, **defaults):
    """The options all comparisons share, and a number for each further default. data: whether --data is needed."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if data:
        parser.add_argument("--data", required=True)
    parser.add_argument("--kinds", nargs="+", choices=kinds, default=kinds)
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
    """Markdown: mean and standard deviation over seeds, losses with three digits."""
    columns = [name for name in next(iter(found.values()))[0] if name not in ("seed", "seconds")]
    lines = [f"| encoding | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    for kind, rows in found.items():
        cells = []
        for column in columns:
            numbers, digits = [row[column] for row in rows], 3 if "loss" in column else 1
            spread = f" ± {statistics.stdev(numbers):.{digits}f}" if len(numbers) > 1 else ""
            cells.append(f"{statistics.mean(numbers):.{digits}f}{spread}")
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return "\n".join(lines)


def report(found, chosen, command):
    """Print the table, and write everything to a file, to which a later call with other kinds or seeds adds."""
    if chosen.out is not None:
        if chosen.out.exists():
            found = merge(json.loads(chosen.out.read_text())["results"], found)
        left_out = ("out", "data", "kinds", "seeds")
        settings = {key: str(value) for key, value in vars(chosen).items() if key not in left_out}
        versions = {"equitape": equitape.__version__, "torch": torch.__version__}
        content = {"command": command, "settings": settings, "versions": versions, "results": found}
        chosen.out.write_text(json.dumps(content, indent=1) + "\n")
    print(table(found))
    return found


def merge(old, new):
    """Rows of both, in the order of their seeds; a new row replaces an old one of the same kind and seed."""
    merged = {}
    for kind in [*old, *(kind for kind in new if kind not in old)]:
        rows = {row["seed"]: row for row in (*old.get(kind, []), *new.get(kind, []))}
        merged[kind] = [rows[seed] for seed in sorted(rows)]
    return merged
