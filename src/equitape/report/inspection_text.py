"""Inspections and certificates as terminal tables."""

import json
from dataclasses import asdict

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..inspect.inspection import Inspection
from ..inspect.stability import VERDICTS, Stability
from ..inspect.verdicts import FAIL, PASS, Certificate
from ..runs.files import plain
from . import numbers
from .inspection_plots import chosen_layers

STYLES = {PASS: "green", FAIL: "bold red"}
VERDICT_STYLES = dict(zip(VERDICTS, ("green", "yellow", "red"), strict=True))


def number(value: float | None) -> str:
    """Two significant digits; empty for None."""
    return "" if value is None else numbers.number(value, digits=2)


def print_certificate(certificate: Certificate, name: str, console: Console) -> None:
    """Print a table of the checks, then the overall verdict."""
    table = Table("check", "verdict", "largest error", "what was checked", box=box.SIMPLE_HEAD)
    for check in certificate.checks:
        meaning = f"{check.meaning}. {check.note}" if check.note else check.meaning
        style = STYLES.get(check.verdict, "yellow")
        table.add_row(check.name, f"[{style}]{check.verdict}[/]", number(check.error), escape(meaning))
    console.print(table)
    for note in certificate.notes:
        console.print(escape(note))
    console.print(
        f"{name}, encoding {certificate.encoding}, {certificate.dtype}, limit {certificate.limit:g} of the "
        f"spread of logits: {'all checks passed' if certificate.passed else 'FAILED'}.",
        highlight=False,
        markup=False,
    )


def certificate_json(certificate: Certificate) -> str:
    """The certificate as JSON; an infinite error becomes null."""
    return json.dumps(plain(asdict(certificate)) | {"passed": certificate.passed}, indent=2)


def narrow_table(columns: list[str]) -> Table:
    """A table whose numbers never wrap; the first column may."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column(columns[0])
    for column in columns[1:]:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def print_layers(inspection: Inspection, console: Console) -> None:
    """One row per measure, one column for each of some layers."""
    measures = inspection.by_layer()
    if not measures:
        return
    # a layer with an encoding of its own has few measures
    full = [layer for layer, values in enumerate(zip(*measures.values(), strict=True)) if None not in values]
    layers = [full[index] for index in chosen_layers(len(full))] if full else chosen_layers(inspection.num_layers)
    table = narrow_table(["mean by layer", *(str(layer + 1) for layer in layers)])
    for title, values in measures.items():
        table.add_row(title, *(number(values[layer]) for layer in layers))
    console.print(table)


def print_stability(stability: Stability, console: Console) -> None:
    """The paper's Table 8, with verdicts."""
    for what, title in (("attention", "attention x 0.01"), ("products", "state products, %")):
        table = narrow_table([f"{title}, by layer", *map(str, stability.shown_layers(what))])
        for change, values in stability.rows(what):
            cells = (number(None if value is None else 100 * value) for value in values)
            style = VERDICT_STYLES[change.verdict] if what == "attention" else None
            table.add_row(escape(f"{change.model}: {change.disturbance}"), *cells, style=style)
        if table.row_count:
            console.print(table)
    for sentence in (*stability.verdicts(), *stability.notes):
        console.print(escape(sentence), highlight=False)
