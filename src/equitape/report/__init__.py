"""Reports of comparisons: tables, plots, one HTML page that needs nothing beside it, and the same in Markdown."""

from .write import write_report

__all__ = ["write_report"]
