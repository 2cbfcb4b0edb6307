"""`python -m equitape` is the `equitape` command."""

from .cli import app

app()
