"""Pages from templates: self-contained HTML, and Markdown with picture files."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..runs.files import write_bytes, write_text
from .style import Plot, heading
from .tables import markdown_table

PAGE, MARKDOWN = "report.html", "report.md"


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
    templates.filters |= {"markdown": markdown_table, "heading": heading}
    return templates.get_template(template).render(content)


def write_pages(template: str, out: Path, content: dict[str, Any], plots: Sequence[Plot], folder: str = "") -> None:
    """Write report.html (self-contained) and report.md from the templates of a name, and a PNG file per plot.

    folder: of the PNG files, inside `out`.
    """
    write_plots(plots, out / folder)
    content = {"plots": plots, "plots_folder": f"{folder}/" if folder else "", **content}
    for page in (PAGE, MARKDOWN):
        write_text(out / page, render(f"{template}{Path(page).suffix}.j2", **content))


def write_plots(plots: Iterable[Plot], folder: Path) -> list[str]:
    """Write one PNG file per plot; returns the names of the files."""
    files = {f"{plot.name}.png": plot.png for plot in plots}
    for name, png in files.items():
        write_bytes(folder / name, png)
    return list(files)
