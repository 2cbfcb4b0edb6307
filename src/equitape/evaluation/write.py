"""The report of an evaluation as Markdown with pictures, other models beside it where they are named."""

import math
from pathlib import Path
from typing import Any

from ..report.plots import Plot
from ..report.tables import Cell, Table, duration, number, readable
from ..report.write import markdown_table, replace_text
from .pictures import draw

PAGE = "report.md"


def write_report(report: dict[str, Any], others: dict[str, dict[str, Any]], out: Path) -> None:
    """report.md and a PNG for every grid, curve and set of bars."""
    reports = {report["model"]["name"]: report, **others}
    if len(reports) <= len(others):
        raise ValueError(f"Two models are called {report['model']['name']!r}; name one otherwise, as NAME=FOLDER.")
    plots = draw(reports, out)
    replace_text(out / PAGE, page(reports, plots))


def page(reports: dict[str, dict[str, Any]], plots: list[Plot]) -> str:
    """The whole report, the first model's; others stand beside it."""
    name, report = next(iter(reports.items()))
    parts = [f"# {report['task']}: {name}"]
    parts += [" ".join(report["protocol"])]
    parts += ["\n".join(f"- {note}" for note in report["notes"])] if report["notes"] else []
    parts += ["## Figures", markdown_table(figures_table(reports)), *contexts_part(reports)]
    parts += ["## At short lengths", *short_part(reports)]
    parts += [f"![{plot.alt}]({plot.name}.png)" for plot in plots]
    parts += ["## How it was made", markdown_table(facts_table(report))]
    return "\n\n".join(parts) + "\n"


def show(value: float | None) -> str:
    """A number, or that there is none; counts, which are whole, without decimals."""
    if isinstance(value, int):
        return f"{value:,}"
    return number(math.nan if value is None else value)


def figures_table(reports: dict[str, dict[str, Any]]) -> Table:
    """A row a metric, a column a model."""
    first = next(iter(reports.values()))
    names = [first["headline"], *(name for name in first["metrics"] if name != first["headline"])]
    rows = [
        [Cell(text=readable(name)), *(Cell(text=show(report["metrics"].get(name))) for report in reports.values())]
        for name in names
        if name in first["metrics"]
    ]
    return Table(title="Figures", columns=["", *reports], rows=rows)


def contexts_part(reports: dict[str, dict[str, Any]]) -> list[str]:
    """A warning where a figure may be of one length for one model and of another for the next."""
    contexts = {name: report["model"]["context"] for name, report in reports.items()}
    if len(set(contexts.values())) == 1:
        return []
    told = ", ".join(f"{name} {'unknown' if size is None else f'{size:,}'}" for name, size in contexts.items())
    return [
        f"Contexts differ ({told}): compare models by the rows of one length; others go by each model's own context."
    ]


def short_part(reports: dict[str, dict[str, Any]]) -> list[str]:
    """Quality at short lengths: what a longer context must not cost."""
    first = next(iter(reports.values()))
    if not first["short"]:
        return ["Nothing was measured at a short length."]
    columns = ["", *reports]
    others = list(reports)[1:]
    columns += [f"change from {name}" for name in others]
    rows = []
    for name, value in first["short"].items():
        row = [Cell(text=readable(name)), *(Cell(text=show(report["short"].get(name))) for report in reports.values())]
        for other in others:
            before = reports[other]["short"].get(name)
            known = value is not None and before is not None
            row.append(Cell(text=f"{value - before:+.4g}" if known else "-"))
        rows.append(row)
    return [markdown_table(Table(title="", columns=columns, rows=rows))]


def facts_table(report: dict[str, Any]) -> Table:
    """Model, options, cost and environment."""
    cost = report["cost"]
    facts = {
        **{f"model {key}": value for key, value in report["model"].items() if key != "name"},
        **{f"option {key}": value for key, value in report["options"].items()},
        "time": None if cost["seconds"] is None else duration(cost["seconds"]),
        "tokens read": None if cost["tokens"] is None else f"{cost['tokens']:,}",
        "peak MiB": None if cost["peak_mib"] is None else f"{cost['peak_mib']:,.0f}",
        **report["environment"],
    }
    rows = [[Cell(text=str(key)), Cell(text=str(value))] for key, value in facts.items() if value is not None]
    return Table(title="", columns=["", ""], rows=rows)
