"""equitape data."""

from typing import Annotated

import typer


def data(
    name: Annotated[str | None, typer.Argument(help="Show this data set only.", show_default=False)] = None,
    download: Annotated[
        bool,
        typer.Option("--download", help="Download it from the Hugging Face Hub to its expected place."),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """List the data sets that recipes name, show where each is expected, and download them.

    Relative paths in recipes and options are resolved against the working directory, then $EQUITAPE_DATA.
    """
    from json import dumps

    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from ..data import catalog
    from ..registry import describe_choices

    if name is not None and name not in catalog.CATALOG:
        raise ValueError(f"Unknown data set {name!r}.{describe_choices(name, list(catalog.CATALOG))}")
    if download:
        if name is None:
            raise ValueError("--download needs the name of a data set, as in equitape data books --download")
        try:
            typer.echo(f"Wrote {catalog.download(name)}.")
        except (ValueError, OSError) as error:
            typer.echo(f"Error: {error}", err=True)
            raise typer.Exit(1) from None
        return
    chosen = [name] if name is not None else list(catalog.CATALOG)
    rows = {}
    for key in chosen:
        entry = catalog.CATALOG[key]
        found = entry.locate()
        rows[key] = {
            "about": entry.about,
            "found": str(found) if found is not None else None,
            "expected": entry.path,
            "splits": list(entry.splits),
            "download": f"equitape data {key} --download" if entry.hub else None,
            "origin": entry.origin,
            "licence": entry.licence,
        }
    if json:
        typer.echo(dumps(rows, indent=2))
        return
    table = Table()
    for column in ("data set", "what it is", "where"):
        table.add_column(column, overflow="fold")
    for key, row in rows.items():
        where = f"found: {row['found']}" if row["found"] else f"missing: expected at {row['expected']}"
        how = row["download"] or f"from {row['origin']}"
        table.add_row(
            key,
            f"{row['about']}\nlicence: {row['licence']}",
            escape(where if row["found"] else f"{where}\nget it: {how}"),
        )
    Console().print(table)
    typer.echo(f"Downloads go to {catalog.data_folder()}; set EQUITAPE_DATA to change the folder.")
    for key in chosen if name is not None else ():
        for split in catalog.CATALOG[key].splits:
            typer.echo(f"  {split}")
