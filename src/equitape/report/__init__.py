"""Reports: pages, plots and tables of comparisons, evaluations, inspections and benchmarks."""

from .comparison import write_report

__all__ = ["write_report"]
