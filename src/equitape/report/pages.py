"""Pages from templates: self-contained HTML, and Markdown with picture files."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..runs.files import write_bytes
from .style import Plot
from .tables import markdown_table


def render(template: str, **content: Any) -> str:
    """Render a template of this folder."""
    import jinja2

    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("equitape", "report"),
        autoescape=lambda name: bool(name and name.endswith(".html.j2")),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters["markdown"] = markdown_table
    return templates.get_template(template).render(content)


def write_plots(plots: Iterable[Plot], folder: Path) -> list[str]:
    """Write one PNG file per plot; returns the names of the files."""
    files = {f"{plot.name}.png": plot.png for plot in plots}
    for name, png in files.items():
        write_bytes(folder / name, png)
    return list(files)
