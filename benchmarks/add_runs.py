"""Add runs of `equitape train` to a committed comparison, and write its report again.

    python benchmarks/add_runs.py beyond-books runs/beyond/beyond-books-* --remark "Runs of 2026-11-18 shared the GPU."

The comparison is docs/results/RECIPE/results.json; its encodings become those of the packaged recipe. A run of the same
label and seed is replaced. A run whose recipe differs is refused, except in --ignore (dotted names): where data lay,
say; so is one whose encoding differs from that of its label. --label FOLDER=LABEL: a run that was made without the
recipe's label. Where there is no comparison yet, the first run begins it.
"""

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from equitape.encodings import ENCODINGS
from equitape.report.comparison import write_report
from equitape.report.merged import MAY_DIFFER, read_run, read_source
from equitape.runs.environment import join_environments
from equitape.runs.files import plain, write_text
from equitape.runs.identity import find_differences
from equitape.runs.results import Comparison, RunResult
from equitape.tasks import TASKS
from equitape.training.recipe import load_recipe, parse_recipe, resolved

RESULTS = Path(__file__).parent.parent / "docs/results"
NOT_RUN = "Not run yet:"


def complete(recipe: dict[str, Any]) -> dict[str, Any]:
    """A recipe with all defaults."""
    found = resolved(parse_recipe(recipe))
    task = dict(found["task"])
    name = task.pop("name")
    options = TASKS[name].options_class.parse(task, f"Task {name!r}")
    return {**found, "task": {"name": name, **plain(asdict(options))}}


def read_runs(folders: list[Path], whole: Comparison, labels: dict[str, str], ignored: list[str]) -> list[RunResult]:
    """The runs of these folders under their labels; SystemExit if one was trained or scored in another way."""
    runs = []
    for folder in folders:
        one = read_run(folder)
        recipes = (complete(each.recipe) for each in (whole, one))
        differences = find_differences(*recipes, [*MAY_DIFFER, *ignored])
        if differences:
            found = "; ".join(map(str, differences))
            raise SystemExit(f"{folder}: {found}. Use --ignore NAME for what does not matter.")
        runs += [replace(run, label=labels.get(folder.name, run.label)) for run in one.runs]
    unknown = sorted(set(labels) - {folder.name for folder in folders})
    if unknown:
        raise SystemExit(f"--label names {', '.join(unknown)}, but no such folder is given.")
    return runs


def check_encodings(whole: Comparison) -> None:
    """SystemExit if two runs of a label have different encodings."""
    first: dict[str, dict[str, Any]] = {}
    for run in whole.runs:
        options = {key: value for key, value in run.encoding.items() if key != "kind"}
        kind = run.encoding["kind"]
        found = {"kind": kind, **plain(asdict(ENCODINGS[kind].options_class.parse(options, f"Encoding {kind!r}")))}
        if first.setdefault(run.label, found) != found:
            differences = "; ".join(map(str, find_differences(first[run.label], found, [])))
            raise SystemExit(f"{run.label}, seed {run.seed}: another encoding than an earlier seed's: {differences}.")


def begun(name: str, folder: Path) -> Comparison:
    """A comparison of the named recipe without runs, made and scored like the run in this folder."""
    one, recipe = read_run(folder), load_recipe(name)
    about = {"name": name, "description": recipe.description}
    return replace(one, name=name, recipe={**one.recipe, **about}, remarks=[], runs=[])


def joined(whole: Comparison, runs: list[RunResult], remarks: list[str]) -> Comparison:
    """The comparison with these runs, in the recipe's order; labels that it does not have come last."""
    recipe = load_recipe(whole.name)
    order = [choice.label for choice in recipe.choices]
    every = {(run.label, run.seed): run for run in [*whole.runs, *runs]}
    missing = [label for label in order if label not in {label for label, _ in every}]
    kept = [remark for remark in whole.remarks if not remark.startswith(NOT_RUN)]
    first = [f"{NOT_RUN} {'; '.join(missing)}."] if missing else []
    order += [label for label, _ in every if label not in order]
    ordered = sorted(every.values(), key=lambda run: (order.index(run.label), run.seed))
    return replace(
        whole,
        recipe={**whole.recipe, "encodings": resolved(recipe)["encodings"]},
        environment=join_environments([run.environment for run in ordered if run.environment]),
        remarks=list(dict.fromkeys([*first, *kept, *remarks])),
        runs=ordered,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument("--remark", action="append", default=[], help="sentence for the report; repeatable")
    parser.add_argument("--ignore", action="append", default=[], help="setting that may differ; repeatable")
    parser.add_argument("--label", action="append", default=[], help="FOLDER=LABEL; repeatable")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the comparisons")
    given = parser.parse_args()
    place = given.results / given.recipe
    whole = read_source(place) if (place / "results.json").exists() else begun(given.recipe, given.folders[0])
    assert isinstance(whole, Comparison)
    runs = read_runs(given.folders, whole, dict(each.split("=", 1) for each in given.label), given.ignore)
    whole = joined(whole, runs, given.remark)
    check_encodings(whole)
    # one line: indented, the losses of every step take ten times as much
    write_text(place / "results.json", json.dumps(whole.to_dict()) + "\n")
    write_report(whole, place)
    print(f"{place}: {len(runs)} runs added, {len(whole.runs)} in all.")


if __name__ == "__main__":
    main()
