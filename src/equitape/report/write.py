"""report.html and report.md from the results of `equitape compare`."""

import json
import os
from pathlib import Path
from typing import Any

from .plots import Plot, all_plots
from .summary import BEST_RULE, MISSING_RUN, SHARES_RULE, Spread, Summary, summarise
from .tables import Cell, Table, claims_table, headline_table, metric_table, number, paired_table, readable, runs_table

PLOTS = "plots"


def write_report(results: dict[str, Any], out_dir: Path) -> None:
    """Write report.html (self-contained), report.md and the pictures it shows into `out_dir`.

    results: what results.json holds; its schema is at the top of training/compare.py. That file itself is not touched.
    """
    import jinja2

    summary = summarise(results)
    plots = all_plots(summary)
    content = {
        "name": results["name"],
        "task": results["task"],
        "description": results["recipe"].get("description") or "",
        "findings": findings(summary),
        "tables": quality_tables(summary),
        "rules": f"{BEST_RULE} {SHARES_RULE}" if summary.has_shares else BEST_RULE,
        "plots": plots,
        "runs": runs_table(summary),
        "environment": environment_rows(results["environment"], summary),
        "recipe": recipe_text(results["recipe"]),
    }
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("equitape", "report"),
        autoescape=lambda name: bool(name and name.endswith(".html.j2")),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters["markdown"] = markdown_table
    out_dir.mkdir(parents=True, exist_ok=True)
    write_plots(plots, out_dir / PLOTS)
    for name in ("report.html", "report.md"):
        replace_text(out_dir / name, templates.get_template(f"{name}.j2").render(content, plots_folder=PLOTS))


def quality_tables(summary: Summary) -> list[Table]:
    """The headline with its cost, every metric in and out of distribution, differences by seed, published numbers."""
    tables = [headline_table(summary)]
    # the headline, which may be of both kinds, stands in the first table
    parts = {
        "In distribution": [name for name in summary.metric_names(outside=False) if name != summary.headline],
        "Out of distribution": summary.metric_names(outside=True),
    }
    tables += [metric_table(summary, title, names) for title, names in parts.items() if names]
    paired = paired_table(summary, list(dict.fromkeys([summary.headline, *parts["Out of distribution"]])))
    return [*tables, *(table for table in (paired, claims_table(summary)) if table is not None)]


def findings(summary: Summary) -> list[str]:
    """What the figures allow to say, in sentences."""
    name, told = summary.headline, []
    spreads = {group.label: spread for group in summary.groups if (spread := group.metric(name)) is not None}
    better = summary.higher_is_better(name)
    if spreads:
        best = (max if better else min)(spread.mean for spread in spreads.values())
        first = [label for label, spread in spreads.items() if spread.mean == best]
        told.append(leader(summary, first[0], spreads) if len(first) == 1 else tie(summary, first, best, len(spreads)))
    else:
        told.append("No run was finished: there is nothing to compare yet.")
    fewest, most = min(summary.seed_counts), max(summary.seed_counts)
    each = f"{most} seed{'s' if most > 1 else ''} each" if fewest == most else f"{fewest} to {most} seeds"
    count = len(summary.groups)
    told.append(f"{count} encoding{'s' if count > 1 else ''}, {each}: {', '.join(map(str, summary.seeds))}.")
    for run in summary.unfinished:
        if run["status"] != MISSING_RUN:
            told.append(f"{run['label']}, seed {run['seed']}: {run['status']}. {run.get('note') or ''}".strip())
    missing = sum(run["status"] == MISSING_RUN for run in summary.unfinished)
    if missing:
        told.append(f"{missing} of {sum(summary.seed_counts)} runs have not been made yet.")
    return told


def tie(summary: Summary, first: list[str], best: float, count: int) -> str:
    """Several encodings with the very same best mean, such as the zero of a task that none of them solves."""
    value = f"{readable(summary.headline)} {number(best)}"
    if len(first) == count:
        return f"All {count} encodings have {value}, which tells none of them apart."
    return f"{', '.join(first[:-1])} and {first[-1]} share the first place with {value}: nothing is marked best."


def leader(summary: Summary, first: str, spreads: dict[str, Spread]) -> str:
    """How far the encoding with the best mean is ahead of the others."""
    found, better = spreads[first], bool(summary.higher_is_better(summary.headline))
    value = f"{readable(summary.headline)} {number(found.mean)}"
    if summary.best(summary.headline) is not None:
        return f"{first} leads with {value}, by more than the seeds spread."
    if found.count == 1:
        return f"{first} comes first with {value}, from a single seed: no spread is known, so nothing is marked best."
    others = {label: spread for label, spread in spreads.items() if label != first}
    alone = [label for label, spread in others.items() if spread.count == 1]
    if not all(found.leads(other, better) for label, other in others.items() if label not in alone):
        return f"{first} comes first with {value}, but not by more than the seeds spread: no encoding is marked best."
    ahead = f"{first} comes first with {value}" + (
        ", by more than the seeds spread" if len(others) > len(alone) else ""
    )
    if any(group.unfinished for group in summary.groups if group.label == first):
        return f"{ahead}; not all of its runs were finished, so nothing is marked best."
    if alone:
        return f"{ahead}; no spread is known of the {len(alone)} with one seed, so nothing is marked best."
    return f"{ahead}."


def environment_rows(environment: dict[str, Any], summary: Summary) -> list[tuple[str, str]]:
    """Versions, hardware, commit, date and seeds as pairs."""
    rows = [(readable(key), str(value)) for key, value in environment.items()]
    return [*rows, ("seeds", ", ".join(map(str, summary.seeds)))]


def recipe_text(recipe: dict[str, Any]) -> str:
    """The resolved recipe as YAML, which runs the same comparison again."""
    import yaml

    # tuples become lists, as in results.json
    recipe = json.loads(json.dumps(recipe))
    return yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True, width=120)


def markdown_table(table: Table) -> str:
    """A table in Markdown, details in brackets."""

    def text(cell: Cell) -> str:
        star = " ★" if cell.kind == "best" else ""
        detail = f" ({cell.detail})" if cell.detail else ""
        return f"{cell.text}{star}{detail}".replace("|", "\\|").replace("\n", " ")

    lines = [table.columns, ["---"] + ["---:"] * (len(table.columns) - 1)]
    lines += [[text(cell) for cell in row] for row in table.rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def write_plots(plots: list[Plot], folder: Path) -> None:
    """One PNG a plot, for the Markdown report."""
    folder.mkdir(exist_ok=True)
    for plot in plots:
        (folder / f"{plot.name}.png").write_bytes(plot.png)


def replace_text(path: Path, text: str) -> None:
    """Write aside and rename: a reader never finds half a page."""
    aside = path.with_name(path.name + ".part")
    aside.write_text(text, encoding="utf-8")
    os.replace(aside, path)
