"""Inspections and certificates in the terminal."""

import json
from dataclasses import asdict

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .certificate import FAIL, PASS, Certificate
from .look import Inspection
from .page import lines_of
from .pictures import chosen_layers
from .stability import Stability

STYLES = {PASS: "green", FAIL: "bold red"}


def number(value: float | None) -> str:
    """Two significant digits."""
    return "" if value is None else f"{value:.2g}"


def print_certificate(certificate: Certificate, name: str, console: Console) -> None:
    """A table, then the verdict on all of it."""
    table = Table("check", "verdict", "largest error", "what was checked", box=box.SIMPLE_HEAD)
    for check in certificate.checks:
        told = f"{check.meaning}. {check.note}" if check.note else check.meaning
        style = STYLES.get(check.verdict, "yellow")
        table.add_row(check.name, f"[{style}]{check.verdict}[/]", number(check.error), escape(told))
    console.print(table)
    for note in certificate.notes:
        console.print(escape(note))
    console.print(
        f"{escape(name)}, encoding {certificate.encoding}, {certificate.dtype}, limit {certificate.limit:g} of the "
        f"spread of logits: {'all promises kept' if certificate.passed else 'BROKEN'}.",
        highlight=False,
    )


def certificate_json(certificate: Certificate) -> str:
    """The same for programs; an infinite error is written as null with its verdict beside it."""
    plain = asdict(certificate) | {"passed": certificate.passed}
    for check in plain["checks"]:
        if check["error"] == float("inf"):
            check["error"] = None
    return json.dumps(plain, indent=2)


def narrow_table(columns: list[str]) -> Table:
    """A table whose figures are never cut; the first column may wrap."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column(columns[0])
    for column in columns[1:]:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def print_layers(seen: Inspection, console: Console) -> None:
    """One row a measure, one column for each of some layers."""
    lines = lines_of(seen)
    if not lines:
        return
    layers = chosen_layers(seen.num_layers)
    table = narrow_table(["mean by layer", *(str(layer + 1) for layer in layers)])
    for line in lines:
        table.add_row(line["title"], *(number(line["values"][layer]) for layer in layers))
    console.print(table)


def print_stability(stability: Stability, console: Console) -> None:
    """The paper's Table 8."""
    layers = stability.shown_layers()
    for what, title in (("attention", "attention x 0.01"), ("products", "state products, %")):
        table = narrow_table([f"{title}, by layer", *map(str, layers)])
        for change in stability.changes:
            values = getattr(change, what)
            if values is not None:
                cells = (number(100 * values[layer - 1]) if layer <= len(values) else "" for layer in layers)
                table.add_row(escape(f"{change.model}: {change.disturbance}"), *cells)
        if table.row_count:
            console.print(table)
    for note in stability.notes:
        console.print(escape(note), highlight=False)
