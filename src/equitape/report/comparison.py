"""The report of a comparison: report.html and report.md from the results of `equitape compare`."""

import json
import re
from pathlib import Path
from typing import Any

from ..registry import counted
from ..runs.results import MISSING as NOT_RUN
from ..runs.results import Comparison
from .comparison_plots import LOSS, all_plots
from .comparison_tables import claims_table, headline_table, metric_table, paired_table, runs_table
from .numbers import readable, with_unit
from .pages import write_pages
from .summary import BEST_RULE, PARTS, Spread, Summary, summarise
from .tables import Table

PLOTS = "plots"
RECIPE = "The full recipe, defaults included"


def write_report(results: Comparison | dict[str, Any], out_dir: Path) -> None:
    """Write report.html (self-contained), report.md and its pictures to `out_dir`.

    results: a comparison, or the content of its results.json.
    """
    comparison = Comparison.from_dict(results) if isinstance(results, dict) else results
    summary = summarise(comparison)
    write_comparison(summary, out_dir, [(RECIPE, recipe_text(comparison.recipe))])


def write_comparison(summary: Summary, out_dir: Path, recipes: list[tuple[str, str]]) -> None:
    """Write the pages of a comparison.

    recipes: (heading, YAML) of its sources.
    """
    results = summary.results
    plots, tables = all_plots(summary), score_tables(summary)
    tables += [table for table in (difference_table(summary), claims_table(summary)) if table is not None]
    content = {
        "name": results.name,
        "task": results.task,
        "idea": task_idea(results),
        "description": results.recipe.get("description") or "",
        "findings": [*findings(summary), *results.remarks],
        "headline_table": tables[0],
        "tables": tables[1:],
        "rules": BEST_RULE,
        # scores follow the headline; training plots come after all tables
        "plots": [plot for plot in plots if plot.name != LOSS],
        "late_plots": [plot for plot in plots if plot.name == LOSS],
        "runs": runs_table(summary),
        "environment": environment_rows(results.environment, summary),
        "recipes": recipes,
    }
    write_pages("comparison", out_dir, content, plots, PLOTS)


def task_idea(results: Comparison) -> str:
    """The task in one line, with the evaluated lengths from its options."""
    idea = results.task.idea
    factors = (results.recipe.get("task") or {}).get("factors")
    if not factors:
        return idea
    times = [str(factor) for factor in sorted(set(factors))]
    listed = times[0] if len(times) == 1 else f"{', '.join(times[:-1])} and {times[-1]}"
    # the task's description is the same for all options
    return re.sub(r", scored at .*$", "", idea) + f", scored at {listed} times the trained length"


def score_tables(summary: Summary) -> list[Table]:
    """The headline with its cost, and all metrics in and out of distribution."""
    tables = [headline_table(summary)]
    for part in PARTS:
        # the headline is in the first table
        names = [name for name in summary.metric_names(part) if name != summary.headline]
        if names:
            tables.append(metric_table(summary, part, names))
    return tables


def difference_table(summary: Summary) -> Table | None:
    """Paired differences of the headline and of all metrics out of distribution."""
    return paired_table(summary, list(dict.fromkeys([summary.headline, *summary.metric_names(PARTS[1])])))


def findings(summary: Summary) -> list[str]:
    """The findings as sentences."""
    name = summary.headline
    spreads = {group.label: spread for group in summary.groups if (spread := group.metric(name)) is not None}
    warning = summary.results.task.warning
    sentences = [warning] if warning else []
    if spreads:
        best = (max if summary.higher_is_better(name) else min)(spread.mean for spread in spreads.values())
        first = [label for label, spread in spreads.items() if spread.mean == best]
        sentences.append(
            leader(summary, first[0], spreads) if len(first) == 1 else tie(summary, first, best, len(spreads))
        )
    else:
        sentences.append("No run is finished yet, so there is nothing to compare.")
    fewest, most = min(summary.seed_counts), max(summary.seed_counts)
    each = f"{counted(most, 'seed')} each" if fewest == most else f"{fewest} to {most} seeds"
    count = len(summary.groups)
    sentences.append(f"{counted(count, 'encoding')}, {each}: {', '.join(map(str, summary.seeds))}.")
    for group in summary.groups:
        for run in group.finished:
            if run.metric(name) is None and group.label in spreads:
                sentences.append(f"{run.label}, seed {run.seed}: {readable(name)} is not finite; means leave it out.")
    for run in summary.unfinished:
        if run.status != NOT_RUN:
            sentences.append(f"{run.label}, seed {run.seed}: {run.status}. {run.note}".strip())
    missing = sum(run.status == NOT_RUN for run in summary.unfinished)
    if missing:
        sentences.append(f"Not started yet: {missing} of {counted(sum(summary.seed_counts), 'run')}.")
    return sentences


def headline_value(summary: Summary, value: float) -> str:
    """The headline metric and a value with its unit."""
    unit = summary.unit(summary.headline)
    return f"{readable(summary.headline)} {with_unit(value, unit)} {unit}".strip()


def tie(summary: Summary, first: list[str], best: float, count: int) -> str:
    """Several encodings have the same best mean, for example zero in a task that none solves."""
    value = headline_value(summary, best)
    if len(first) == count:
        return f"All {count} encodings have {value}, so the result does not distinguish them."
    return f"None is marked best, since {len(first)} share first place with {value}: {'; '.join(first)}."


def leader(summary: Summary, first: str, spreads: dict[str, Spread]) -> str:
    """The lead of the encoding with the best mean."""
    found, better = spreads[first], bool(summary.higher_is_better(summary.headline))
    value = headline_value(summary, found.mean)
    if summary.best(summary.headline) is not None:
        return f"{first} leads with {value}, by more than the spread over seeds."
    if found.count == 1:
        return f"{first} comes first with {value}, from a single seed. Its spread is unknown, so none is marked best."
    others = {label: spread for label, spread in spreads.items() if label != first}
    alone = [label for label, spread in others.items() if spread.count == 1]
    if not all(found.leads(other, better) for label, other in others.items() if label not in alone):
        return f"{first} comes first with {value}, but within the spread over seeds; none is marked best."
    ahead = f"{first} comes first with {value}" + (
        ", by more than the spread over seeds" if len(others) > len(alone) else ""
    )
    if not all(group.has_all(summary.headline) for group in summary.groups if group.label == first):
        return f"{ahead}. Not all of its runs have a score, so none is marked best."
    if alone:
        return f"{ahead}. The spread of the {len(alone)} with one seed is unknown, so none is marked best."
    return f"{ahead}."


def environment_rows(environment: dict[str, Any], summary: Summary) -> list[tuple[str, str]]:
    """Versions, hardware, commit, date and seeds as pairs."""
    rows = [(readable(key), str(value)) for key, value in environment.items()]
    return [*rows, ("seeds", ", ".join(map(str, summary.seeds)))]


def recipe_text(recipe: dict[str, Any]) -> str:
    """The resolved recipe as YAML, which reproduces the comparison."""
    import yaml

    # tuples become lists, as in results.json
    recipe = json.loads(json.dumps(recipe))
    return yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True, width=120)
