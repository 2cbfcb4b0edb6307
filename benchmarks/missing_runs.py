"""Print the commands for the runs that a recipe asks for and its results do not have, for side_by_side.py.

    python benchmarks/missing_runs.py beyond-addition beyond-s5 --out runs/beyond --since 2026-11-16T22 > commands.txt
    python benchmarks/side_by_side.py commands.txt --out runs/queue --at-once 18 --minutes 9
    equitape report OLD=docs/results/beyond-addition runs/beyond/beyond-addition-* --out runs/report

First seeds come first, over all recipes. Results are those in docs/results/RECIPE/results.json. --since: runs with a
decay or a clock from before that time count as missing, since such parts had faults that are fixed. --only: labels of
encodings. --overrides, as the last option, changes the recipe: `--overrides train.steps=8000`. Results count whatever
their recipe was, so give a recipe that was changed another folder of results.
"""

import argparse
import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from equitape.runs.folders import file_name
from equitape.training.recipe import Recipe, load_recipe

RESULTS = Path(__file__).parent.parent / "docs/results"


def finished(recipe: str, since: str) -> set[tuple[str, int]]:
    """Label and seed of the runs that need not be repeated."""
    path = RESULTS / recipe / "results.json"
    runs = json.loads(path.read_text())["runs"] if path.exists() else []
    return {(run["label"], run["seed"]) for run in runs if run["status"] == "done" and is_current(run, since)}


def is_current(run: dict[str, Any], since: str) -> bool:
    """Whether a run has neither decay nor clock, or is new enough."""
    encoding = run["encoding"]
    plain = encoding.get("decay", "none") == "none" and not encoding.get("clock", False)
    made = (run.get("environment") or {}).get("date", "")
    return (plain and encoding["kind"] != "fox") or made >= since


def missing(recipe: Recipe, done: set[tuple[str, int]]) -> Iterator[tuple[int, str]]:
    """(seed, label) of every run that is not done."""
    for choice in recipe.choices:
        for seed in choice.seeds:
            if (choice.label, seed) not in done:
                yield seed, choice.label


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="+")
    parser.add_argument("--out", required=True, help="folder of the runs")
    parser.add_argument("--since", default="", help="day, or day and hour, as in 2026-11-16T22")
    parser.add_argument("--seed", type=int, action="append", help="only this seed; repeatable")
    parser.add_argument("--only", action="append", help="only the encoding with this label; repeatable")
    parser.add_argument("--overrides", nargs=argparse.REMAINDER, default=[], help="of the recipe; must come last")
    given = parser.parse_args()
    found = []
    for name in given.recipes:
        recipe = load_recipe(name, given.overrides)
        for label in given.only or ():
            recipe.choose(label)
        for seed, label in missing(recipe, finished(name, given.since)):
            if (given.seed is None or seed in given.seed) and (given.only is None or label in given.only):
                found.append((seed, name, label))
    for seed, name, label in sorted(found, key=lambda run: run[0]):
        out = f"{given.out}/{name}-{file_name(label)}-seed{seed}"
        words = ["equitape", "train", name, *given.overrides, "--encoding", label, "--seed", str(seed), "--out", out]
        print(shlex.join([*words, "--resume"]))


if __name__ == "__main__":
    main()
