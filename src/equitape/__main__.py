"""Run the `equitape` command with `python -m equitape`."""

from .cli import app

app()
