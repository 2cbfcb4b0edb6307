"""equitape data."""

from typing import Annotated

import typer

from .options import AsJson, print_json, table_of


def data(
    name: Annotated[str | None, typer.Argument(help="Show this data set only.", show_default=False)] = None,
    download: Annotated[
        bool,
        typer.Option("--download", help="Download it from the Hugging Face Hub to its expected place."),
    ] = False,
    json: AsJson = False,
) -> None:
    """List the data sets that recipes name, show where each is expected, and download them.

    Relative paths in recipes and options are resolved against the working directory, then $EQUITAPE_DATA.
    """
    from rich.console import Console

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
        print_json(rows, indent=2)
        return
    shown = []
    for key, row in rows.items():
        how = row["download"] or f"from {row['origin']}"
        missing = f"missing: expected at {row['expected']}\nget it: {how}"
        where = f"found: {row['found']}" if row["found"] else missing
        shown.append((key, f"{row['about']}\nlicence: {row['licence']}", where))
    Console().print(table_of(("data set", "what it is", "where"), shown))
    typer.echo(f"Downloads go to {catalog.data_folder()}; set EQUITAPE_DATA to change the folder.")
    for key in chosen if name is not None else ():
        for split in catalog.CATALOG[key].splits:
            typer.echo(f"  {split}")
