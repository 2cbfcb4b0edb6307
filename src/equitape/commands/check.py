"""equitape check."""

from typing import Annotated

import typer
from rich.console import Console

from ..settings import Ge, Le, Lt, check_value
from .options import AsJson

Tokens = Annotated[int, Ge(8), Le(1 << 16)]
Seed = Annotated[int, Ge(0), Lt(1 << 32)]


def check(
    model: Annotated[str, typer.Argument(help="Folder of a model, run or adapter, or FILE.py:NAME of a module.")],
    base: Annotated[str | None, typer.Option(help="The pretrained model under an adapter.")] = None,
    dtype: Annotated[
        str, typer.Option(help="float64, or float32 if the model is too large; float32 rounding hides small errors.")
    ] = "float64",
    tokens: Annotated[int, typer.Option(help="Random tokens per row, at most what the model takes.")] = 32,
    seed: Annotated[int, typer.Option(help="Seed of the random tokens.")] = 0,
    json: AsJson = False,
) -> None:
    """Check that a model is invariant to shifts, causal, and consistent with cache, padding and packing.

    The exit code is 1 if a check fails. Properties that the encoding does not claim are not counted. A module built
    from equitape.nn is given as FILE.py:NAME: the module, or a function that returns it.
    """
    from ..inspect.certificate import certify
    from ..inspect.load import load_module, names_module
    from ..pretrained.loading import load_model
    from ..report.inspection_text import certificate_json, print_certificate
    from ..runs.progress import Progress

    if dtype not in ("float64", "float32"):
        raise ValueError(f"dtype is {dtype!r}; it must be float64 or float32.")
    check_value(tokens, Tokens, "--tokens")
    check_value(seed, Seed, "--seed")
    progress = Progress(Console(stderr=True))
    with progress.phase("loading the model"):
        is_module = names_module(model)
        loaded = load_module(model, dtype) if is_module else load_model(model, dtype, base, as_ours=False)
    with progress.phase("checking"):
        certificate = certify(loaded, tokens, seed)
    if json:
        typer.echo(certificate_json(certificate))
    else:
        print_certificate(certificate, model, Console())
    if not certificate.passed:
        raise typer.Exit(1)
