"""transformers' progress bars, which count files that take milliseconds."""

from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled


@contextmanager
def without_bars() -> Iterator[None]:
    """Hide them inside the block."""
    shown = is_progress_bar_enabled()
    disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            enable_progress_bar()
