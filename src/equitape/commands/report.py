"""equitape report."""

from pathlib import Path
from typing import Annotated

import typer

from .options import named_folder


def report(
    folders: Annotated[
        list[str],
        typer.Argument(help="Folders of equitape compare, train or eval, each as FOLDER or NAME=FOLDER."),
    ],
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("runs/report"),
) -> None:
    """Merge runs, comparisons or evaluations into one report: HTML, Markdown, CSV and LaTeX.

    Comparisons and runs of one task are joined by encoding and seed, with seed-paired differences and 95 % confidence
    intervals. The headline metric of a length task is its out-of-distribution score. Evaluations of several models are
    shown side by side. No model is loaded.
    """
    from ..report.merged import write_merged

    files = write_merged([named_folder(folder) for folder in folders], out)
    typer.echo(f"Written to {out}: {', '.join(files)}.")
