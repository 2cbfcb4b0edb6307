"""`equitape report`: merge comparisons, runs or evaluations into one report, also as CSV and LaTeX."""

import contextlib
import csv
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from ..evaluation.runner import REPORT, differences_between
from ..runs.environment import join_environments
from ..runs.files import check_writable, read_json, write_text
from ..runs.identity import find_differences
from ..runs.results import DONE, Comparison, EvaluationReport, RunResult
from ..tasks import TASKS
from ..tasks.base import describe_task
from ..training.compare import RESULTS
from ..training.recipe import read_recipe, resolved
from ..training.run import DATA, IGNORED_DIFFERENCES, RUN
from ..training.run import RECIPE as RUN_RECIPE
from ..training.settings import current_names
from .comparison import RECIPE, difference_table, recipe_text, score_tables, write_comparison
from .evaluation import evaluation_tables, write_evaluation
from .summary import Group, Spread, Summary, summarise
from .tables import latex_document, latex_table

FILES = ("report.html", "report.md", "report.csv", "runs.csv", "report.tex")
MAY_DIFFER = (*IGNORED_DIFFERENCES, "encodings", "seeds", "evaluation.share_while_training")
"""Parts of recipes that may differ between merged runs."""


def write_merged(folders: list[tuple[str, Path]], out: Path) -> list[str]:
    """Write one report on all folders to `out`; returns the names of its files.

    folders: (name, folder) of comparisons and runs, or of evaluations, all of the same task.
    """
    if not folders:
        raise ValueError("Give at least one folder of equitape compare, train or eval.")
    check_place(out)
    contents = [(name, read_source(folder)) for name, folder in folders]
    comparisons = {name: content for name, content in contents if isinstance(content, Comparison)}
    evaluations = {name: content for name, content in contents if isinstance(content, EvaluationReport)}
    if len(comparisons) + len(evaluations) < len(contents):
        names = [name for name, _ in folders]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"Two folders are called {twice!r}; rename one with NAME=FOLDER.")
    digests = {(folder / DATA).read_text(encoding="utf-8") for _, folder in folders if (folder / DATA).exists()}
    if len(digests) > 1:
        raise ValueError("The folders hold runs on different data (data-digest.txt); make one report per data set.")
    if comparisons and evaluations:
        raise ValueError(
            f"{next(iter(comparisons))!r} is a comparison and {next(iter(evaluations))!r} an evaluation; "
            "make one report per kind."
        )
    return write_merged_comparison(comparisons, out) if comparisons else write_merged_evaluation(evaluations, out)


def check_place(out: Path) -> None:
    """Raise ValueError for a folder that cannot be written to, or whose own report would be replaced."""
    check_writable(out)
    held = next((name for name in (RUN, RESULTS, REPORT) if (out / name).exists()), None)
    if held is not None:
        raise ValueError(
            f"{str(out)!r} has a {held}, so it holds a run, a comparison or an evaluation with its own report; choose "
            "another folder for --out."
        )


def read_source(folder: Path) -> Comparison | EvaluationReport:
    """The comparison, the single run or the evaluation in a folder."""
    if (folder / RUN).exists() and (folder / RUN_RECIPE).exists():
        return read_run(folder)
    content = read_json(folder / RESULTS)
    if isinstance(content, dict) and "runs" in content:
        return Comparison.read(folder / RESULTS)
    if (folder / REPORT).exists():
        return EvaluationReport.read(folder / REPORT)
    raise ValueError(
        f"{str(folder)!r} has no {RESULTS} of equitape compare, {RUN} of equitape train or {REPORT} of equitape eval; "
        "give the folder of one of these."
    )


def read_run(folder: Path) -> Comparison:
    """A single run of `equitape train` as a comparison with one run."""
    try:
        run = RunResult.from_dict(read_json(folder / RUN))
        recipe = yaml.safe_load((folder / RUN_RECIPE).read_text(encoding="utf-8"))
        task = TASKS[recipe["task"]["name"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise ValueError(f"{str(folder)!r} is not a run of equitape train ({error}).") from None
    return Comparison(
        name=recipe["name"],
        recipe=recipe,
        task=describe_task(task, trained_length=recipe["task"].get("length")),
        claims=recipe.get("claims") or {},
        claims_source=recipe.get("claims_source"),
        environment=join_environments([run.environment] if run.environment else []),
        runs=[run],
    )


def write_merged_comparison(sources: dict[str, Comparison], out: Path) -> list[str]:
    """Pages, CSV and LaTeX of several comparisons."""
    merged, alike = merge(sources)
    summary = replace(summarise(merged), alike=alike)
    recipes = [
        (RECIPE if len(sources) == 1 else f"{RECIPE}: {name}", recipe_text(one.recipe)) for name, one in sources.items()
    ]
    write_comparison(summary, out, recipes)
    write_text(out / "report.csv", figures_csv(summary))
    write_text(out / "runs.csv", runs_csv(summary))
    write_text(out / "report.tex", comparison_latex(summary))
    return list(FILES)


def merge(sources: dict[str, Comparison]) -> tuple[Comparison, bool]:
    """One comparison of all runs, with remarks on merging, and whether all recipes agree.

    Seeds of one encoding are joined if the recipes agree in everything that affects results; otherwise, labels get the
    name of their folder. A seed in several folders is taken from the first that finished it.
    """
    (first_name, first), *others = sources.items()
    remarks = [] if not others else [f"Merged from {', '.join(sources)}."]
    recipes = {name: current_recipe(one.recipe) for name, one in sources.items()}
    alike = True
    for name, _ in others:
        found = find_differences(recipes[first_name], recipes[name], MAY_DIFFER)
        differences = [f"{one.name} {one.was} and {one.now}" for one in found]
        tasks = [text for text in differences if text.startswith("task")]
        if tasks:
            raise ValueError(
                f"{first_name!r} and {name!r} are of different tasks ({tasks[0]}); make one report per task."
            )
        if differences:
            alike = False
            remarks.append(f"Caution: {first_name} and {name} were trained differently: {'; '.join(differences)}.")
    runs: dict[tuple[str, int], RunResult] = {}
    encodings: dict[str, tuple[Any, Any]] = {}
    for name, one in sources.items():
        for run in one.runs:
            trained = run.encoding, find_training(recipes[name], run.label)
            clash = encodings.setdefault(run.label, trained) != trained
            label = run.label if alike and not clash else f"{run.label} ({name})"
            key = (label, run.seed)
            if key in runs and runs[key].status == DONE:
                if run.status == DONE:
                    remarks.append(f"{label}, seed {run.seed} is in several folders; showing the first.")
                continue
            runs[key] = replace(run, label=label)
    labels = list(dict.fromkeys(label for label, _ in runs))
    ordered = sorted(runs.values(), key=lambda run: (labels.index(run.label), run.seed))
    merged = replace(
        first,
        name=" + ".join(dict.fromkeys(one.name for one in sources.values())),
        claims={label: values for one in reversed(sources.values()) for label, values in one.claims.items()},
        claims_source=next((one.claims_source for one in sources.values() if one.claims_source), None),
        environment=join_environments([run.environment for run in ordered if run.environment]),
        remarks=[*dict.fromkeys(text for one in sources.values() for text in one.remarks), *remarks],
        runs=ordered,
    )
    return merged, alike


def find_training(recipe: dict[str, Any], label: str) -> tuple[Any, Any]:
    """The checkpoint and the jumps of an encoding: parts of its training that a run's encoding does not show."""
    with contextlib.suppress(ValueError):
        choice = read_recipe(recipe, "The recipe").choose(label)
        return choice.start, choice.jumps
    return None, None


def current_recipe(recipe: dict[str, Any]) -> dict[str, Any]:
    """A recipe, possibly of an older version, with the current names and, if it is complete, the current defaults."""
    with contextlib.suppress(ValueError):
        return resolved(read_recipe(recipe, "The recipe"))
    return {**recipe, "train": current_names(recipe.get("train") or {})}


def to_csv(columns: list[str], rows: list[list[Any]]) -> str:
    """CSV text; empty cells for missing values."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([["" if cell is None else cell for cell in row] for row in rows])
    return text.getvalue()


def figures_csv(summary: Summary) -> str:
    """One line per encoding and metric: statistics over seeds, and the paired difference to the first encoding."""
    columns = [
        "label", "encoding", "metric", "unit", "higher_is_better", "headline", "seeds", "mean", "deviation", "low",
        "high", "difference_to", "difference", "difference_low", "difference_high", "pairs",
    ]  # fmt: skip
    first = summary.groups[0]
    rows = []
    for group in summary.groups:
        for name in [summary.headline, *(name for name in summary.names if name != summary.headline)]:
            spread = group.metric(name)
            if spread is None:
                continue
            rows.append(
                [
                    group.label, group.kind, name, summary.unit(name), summary.higher_is_better(name),
                    name == summary.headline, spread.count, spread.mean, spread.deviation, spread.low, spread.high,
                    *difference_cells(group, first, name),
                ]
            )  # fmt: skip
    return to_csv(columns, rows)


def difference_cells(group: Group, first: Group, name: str) -> list[Any]:
    """The reference label, the mean difference, its 95 % interval and the number of pairs."""
    spread: Spread | None = None if group is first else group.minus(first, name)
    if spread is None:
        return [None] * 5
    low, high = spread.interval or (None, None)
    return [first.label, spread.mean, low, high, spread.count]


def runs_csv(summary: Summary) -> str:
    """One line per run and metric."""
    columns = [
        "label", "encoding", "seed", "status", "metric", "unit", "value", "parameters", "steps", "trained_tokens",
        "seconds",
    ]  # fmt: skip
    rows = []
    for group in summary.groups:
        for run in group.runs:
            cost = [run.parameters, run.steps, run.trained_tokens, run.seconds]
            about = [run.label, group.kind, run.seed, run.status]
            metrics = run.evaluation.metrics if run.evaluation else {}
            rows += [[*about, name, summary.unit(name), value, *cost] for name, value in metrics.items()]
            if not metrics:
                rows.append([*about, None, None, None, *cost])
    return to_csv(columns, rows)


def comparison_latex(summary: Summary) -> str:
    """All tables as LaTeX; differences have intervals."""
    tables = [latex_table(table) for table in score_tables(summary)]
    paired = difference_table(summary)
    return latex_document([*tables, *([] if paired is None else [latex_table(paired, details=True)])])


def write_merged_evaluation(sources: dict[str, EvaluationReport], out: Path) -> list[str]:
    """Pages, CSV and LaTeX of one evaluation of several models."""
    (first_name, first), *others = sources.items()
    for name, one in others:
        found = differences_between(first.to_dict(), one.to_dict())
        if found:
            raise ValueError(f"{first_name!r} and {name!r} are different evaluations: {found[0]}.")
    named = {name: replace(one, model={**one.model, "name": name}) for name, one in sources.items()}
    write_evaluation(named[first_name], {name: one for name, one in named.items() if name != first_name}, out)
    names = list(dict.fromkeys(name for one in named.values() for name in (*one.metrics, *one.short)))
    rows = [
        [model, metric, one.metric(metric).unit, one.metric(metric).higher_is_better, metric == one.headline, value]
        for model, one in named.items()
        for metric in names
        if (value := one.metrics.get(metric, one.short.get(metric))) is not None
    ]
    columns = ["model", "metric", "unit", "higher_is_better", "headline", "value"]
    write_text(out / "report.csv", to_csv(columns, rows))
    tables = [latex_table(table) for table in evaluation_tables(named) if table.rows]
    write_text(out / "report.tex", latex_document(tables))
    return [name for name in FILES if name != "runs.csv"]
