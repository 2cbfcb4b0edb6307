"""equitape inspect."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def inspect(
    model: Annotated[str, typer.Argument(help="Folder of a model, run or adapter.")],
    text: Annotated[
        str | None, typer.Option(help="Text to read: a file, or the text itself where there is no such file.")
    ] = None,
    ids: Annotated[str | None, typer.Option(help="Token ids instead of text: a file, or numbers like '3 1 4'.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for page, figures and pictures.")] = Path("inspect"),
    tokenizer: Annotated[
        str | None, typer.Option(help="'bytes', or a folder. Default: the model's own.", show_default=False)
    ] = None,
    base: Annotated[str | None, typer.Option(help="The pretrained model under an adapter.")] = None,
    max_tokens: Annotated[int, typer.Option(min=2, help="Read at most this many tokens of the text.")] = 512,
    show: Annotated[str | None, typer.Option(help="Show only tokens FIRST:END, each of them in full.")] = None,
    cells: Annotated[int, typer.Option(min=2, help="Most rows of a map; more tokens are pooled, with a note.")] = 128,
    stability: Annotated[
        bool,
        typer.Option("--stability/--no-stability", help="Also measure stability under shifts (Table 8)."),
    ] = True,
    also: Annotated[
        list[str] | None, typer.Option(help="NAME=FOLDER of another model for the table of stability. Repeatable.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32, float64 or bfloat16.")] = "float32",
) -> None:
    """Show attention, positional states, distances and mixing while a model reads a text.

    Writes one HTML page with sliders for layer and head, which opens without a server, PNG files, and figures as JSON.
    """
    from ..inspect.command import InspectSettings, run

    try:
        settings = InspectSettings(
            model=model,
            text=text,
            ids=ids,
            out=out,
            tokenizer=tokenizer,
            base=base,
            max_tokens=max_tokens,
            show=show,
            cells=cells,
            stability=stability,
            also=tuple(also or ()),
            dtype=dtype,
        )
        run(settings, Console())
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
