"""equitape check."""

from typing import Annotated

import typer
from rich.console import Console


def check(
    model: Annotated[str, typer.Argument(help="Folder of a saved model, of a run or of an adapter.")],
    base: Annotated[str | None, typer.Option(help="The pretrained model under an adapter.")] = None,
    dtype: Annotated[
        str, typer.Option(help="float64, or float32 for models too large for it (rounding then hides small breaks).")
    ] = "float64",
    tokens: Annotated[
        int, typer.Option(min=8, help="Random tokens in a row; fewer where the model takes no more.")
    ] = 32,
    seed: Annotated[int, typer.Option(help="Which random tokens.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON for programs to read.")] = False,
) -> None:
    """Certify that a model keeps its promises: shifts, rotations, causality, cache, padding.

    Exit code 1 tells that one is broken. What an encoding declares not to promise cannot fail.
    """
    from ..inspect.certificate import certify
    from ..pretrained.loading import load_model
    from ..report.inspection_text import certificate_json, print_certificate

    if dtype not in ("float64", "float32"):
        raise typer.BadParameter(f"dtype is {dtype!r}; it must be float64 or float32.")
    try:
        certificate = certify(load_model(model, dtype, base, as_ours=False), tokens, seed)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if json:
        typer.echo(certificate_json(certificate))
    else:
        print_certificate(certificate, model, Console())
    if not certificate.passed:
        raise typer.Exit(1)
