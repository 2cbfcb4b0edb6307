"""The report of an evaluation: an HTML page, Markdown and plots, optionally with other models side by side."""

from pathlib import Path
from typing import Any

from rich import table as terminal
from rich.console import Console
from rich.markup import escape

from ..evaluation.runner import REPORT, RESULTS, read_other
from ..runs.results import EvaluationReport
from .evaluation_plots import Reports, evaluation_plots
from .numbers import duration, number, with_unit
from .pages import MARKDOWN, PAGE, write_pages
from .tables import Cell, Table

INTERVALS = "Intervals are 95 % confidence intervals over documents."
MOST_COLUMNS_OF_CHANGES = 2
"""More would be wider than a page."""


def report_folder(folder: Path | str, beside: dict[str, Path] | None = None) -> None:
    """Write the pages and plots of an evaluation from its report.json.

    beside: folders of the same evaluation of other models, by display name.
    """
    report = EvaluationReport.read(Path(folder) / REPORT)
    others = {name: read_other(other, report.to_dict()) for name, other in (beside or {}).items()}
    write_evaluation(report, {name: EvaluationReport.from_dict(other) for name, other in others.items()}, Path(folder))


def write_evaluation(report: EvaluationReport, others: Reports, out: Path) -> None:
    """Write report.html (self-contained), report.md and a PNG per grid, curve and bar chart to `out`.

    others: reports of the same evaluation of other models, by name.
    """
    reports = {report.model["name"]: report, **others}
    if len(reports) <= len(others):
        raise ValueError(f"Two models are called {report.model['name']!r}; rename one with NAME=FOLDER.")
    content = {
        "title": f"{report.task}: {', '.join(reports) if len(reports) <= 4 else f'{len(reports)} models'}",
        "idea": report.idea,
        "protocol": report.protocol,
        "notes": notes_of(reports),
        "tables": evaluation_tables(reports),
        "facts": {name: facts_of(one) for name, one in reports.items()},
    }
    write_pages("evaluation", out, content, evaluation_plots(reports))


def notes_of(reports: Reports) -> list[str]:
    """Each note once, prefixed by its models unless it holds for all."""
    whose: dict[str, list[str]] = {}
    for name, report in reports.items():
        for note in report.notes:
            whose.setdefault(note, []).append(name)
    notes = [note if len(names) == len(reports) else f"{', '.join(names)}: {note}" for note, names in whose.items()]
    return notes + contexts_note(reports)


def contexts_note(reports: Reports) -> list[str]:
    """A warning if models have different contexts, since some figures are then at different lengths."""
    contexts = {name: report.model["context"] for name, report in reports.items()}
    if len(set(contexts.values())) == 1:
        return []
    listed = ", ".join(f"{name} {'unknown' if size is None else f'{size:,}'}" for name, size in contexts.items())
    return [
        f"Contexts differ ({listed}). Compare rows with an explicit length; other rows use each model's own context."
    ]


def evaluation_tables(reports: Reports) -> list[Table]:
    """All metrics, and quality at short lengths."""
    return [figures_table(reports), short_table(reports)]


def title_of(report: EvaluationReport, name: str) -> str:
    """A metric with its unit and direction."""
    return report.metric(name).title(name)


def figures_table(reports: Reports) -> Table:
    """One row per metric, one column per model, the headline first."""
    first = next(iter(reports.values()))
    found = list(dict.fromkeys(name for report in reports.values() for name in report.metrics))
    rows = [
        [
            Cell(text=title_of(first, name), kind="clear" if name == first.headline else ""),
            *(
                Cell(
                    text=with_unit(report.metrics.get(name), first.metric(name).unit),
                    detail=interval_text(report.intervals.get(name)),
                )
                for report in reports.values()
            ),
        ]
        for name in sorted(found, key=lambda name: name != first.headline)
    ]
    notes = [INTERVALS] * any(report.intervals for report in reports.values())
    return Table(title="Figures", columns=["metric", *reports], rows=rows, notes=notes)


def interval_text(interval: list[float] | None) -> str:
    """An interval in words, empty for none."""
    return "" if interval is None else f"{number(interval[0])} to {number(interval[1])}"


def short_table(reports: Reports) -> Table:
    """Quality at short lengths, which context extension must preserve, and its change from the other models.

    Changes have a column each, or are below the values if there are many other models.
    """
    first = next(iter(reports.values()))
    others = list(reports)[1:]
    apart = len(others) <= MOST_COLUMNS_OF_CHANGES
    rows = []
    for name in dict.fromkeys(name for report in reports.values() for name in report.short):
        value = first.short.get(name)
        values = {model: one.short.get(name) for model, one in reports.items()}
        changes = {
            model: "-" if value is None or before is None else f"{value - before:+.4g}"
            for model, before in list(values.items())[1:]
        }
        cells = [
            Cell(text=with_unit(found, first.metric(name).unit), detail="" if apart else changes.get(model, ""))
            for model, found in values.items()
        ]
        if apart:
            cells += [Cell(text=change) for change in changes.values()]
        rows.append([Cell(text=title_of(first, name)), *cells])
    notes = [] if apart else [f"With each value, the change from it to {next(iter(reports))}."]
    return Table(
        title="At short lengths",
        columns=["metric", *reports, *(f"change from {name}" for name in others if apart)],
        rows=rows,
        notes=notes if rows else ["Nothing was measured at a short length."],
    )


def facts_of(report: EvaluationReport) -> list[tuple[str, str]]:
    """Model, options, cost and environment as pairs."""
    cost = report.cost
    facts = {
        **{f"model {key}": value for key, value in report.model.items() if key != "name"},
        **{f"option {key}": value for key, value in report.options.items()},
        "time": None if cost.get("seconds") is None else duration(cost["seconds"]),
        "tokens read": None if cost.get("tokens") is None else f"{cost['tokens']:,}",
        "peak MiB": None if cost.get("peak_mib") is None else f"{cost['peak_mib']:,.0f}",
        **report.environment,
    }
    return [(str(key), str(value)) for key, value in facts.items() if value is not None]


def print_report(report: dict[str, Any], folder: Path, console: Console) -> None:
    """Print the figures. report: the content of report.json."""
    read = EvaluationReport.from_dict(report)
    table = terminal.Table(
        "",
        terminal.Column(justify="right"),
        title=escape(f"{report['task']}: {report['model']['name']}"),
        show_header=False,
    )
    intervals = report.get("intervals") or {}
    for prefix, figures in (("", report["metrics"]), ("short: ", report["short"])):
        for name, value in figures.items():
            found = interval_text(intervals.get(name))
            shown = with_unit(value, read.metric(name).unit) + (f" ({found})" if found else "")
            table.add_row(escape(prefix + title_of(read, name)), shown)
    console.print(table)
    if intervals:
        console.print(INTERVALS, highlight=False)
    for sentence in (*report["protocol"], *report["notes"]):
        console.print(escape(sentence), highlight=False)
    seconds = report["cost"]["seconds"]
    if seconds is not None:
        console.print(f"{duration(seconds)} on {report['environment']['device']}.", highlight=False, markup=False)
    files = f"{PAGE}, {MARKDOWN}, {REPORT}, {RESULTS}"
    console.print(f"Written to {folder}: {files}.", highlight=False, markup=False, soft_wrap=True)
