"""Progress of a command: named phases, as bars on a terminal or as one line per minute elsewhere.

    progress = Progress(console)
    with progress.phase("training", total=1000, unit="step") as phase:
        phase.update(17, "loss 2.31")

Several runs share one display, which then also shows the remaining time of all runs:

    with progress.over_runs(12):
        ...
        progress.end_run()
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich import progress as bars
from rich.console import Console
from rich.markup import escape

SECONDS_BETWEEN_LINES = 60


class Phase:
    """One named piece of work."""

    def __init__(self, display: "Progress", name: str, total: float | None, done: float, unit: str, main: bool):
        self.name = name
        self.total = total
        self.main = main
        self.done = done
        self.figures = ""
        self._display = display
        self._unit = unit
        self._row = display._bar.add_task(escape(name), total=total, count=self.count, figures="")
        display._bar.update(self._row, completed=done)
        self.share_before = self.share
        """Work done by an earlier process; excluded from the speed of this one."""

    def update(self, done: float | None = None, figures: str | None = None, total: float | None = None) -> None:
        """Set how much is done, the total, and figures to show next to the bar."""
        self.done = self.done if done is None else done
        self.total = self.total if total is None else total
        self.figures = self.figures if figures is None else figures
        self._display._bar.update(
            self._row, completed=self.done, total=self.total, count=self.count, figures=escape(self.figures)
        )
        self._display._tick()

    def advance(self, amount: float) -> None:
        """Advance by an amount."""
        self.update(self.done + amount)

    @property
    def share(self) -> float:
        """Fraction done, from 0 to 1; 0 if the total is unknown."""
        return min(1.0, self.done / self.total) if self.total else 0.0

    @property
    def count(self) -> str:
        """How much is done, as text."""
        if self._unit:
            total = "" if self.total is None else f" of {self.total:,.0f}"
            return f"{self._unit} {self.done:,.0f}{total}"
        return f"{self.share:.0%}" if self.total else ""


class Progress:
    """Shows phases on a console; shows nothing without one."""

    def __init__(self, console: Console | None = None):
        self.console = console or Console(quiet=True)
        self._lines = not self.console.is_terminal and not self.console.quiet
        self._bar = bars.Progress(
            bars.TextColumn("{task.description}"),
            bars.BarColumn(bar_width=24),
            bars.TextColumn("{task.fields[count]}"),
            bars.TextColumn("{task.fields[figures]}"),
            bars.TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal or self.console.quiet,
            transient=True,
        )
        self._phases: list[Phase] = []
        self._began = self._last_line = time.monotonic()
        self._runs, self._ended_runs = 0, 0
        self._overall: bars.TaskID | None = None
        self._open = 0

    @contextmanager
    def phase(
        self, name: str, total: float | None = None, *, done: float = 0, unit: str = "", main: bool = False
    ) -> Iterator[Phase]:
        """Show a phase while the block runs.

        done: part of `total` done by an earlier process. unit: what is counted. main: its fraction is that of the run.
        """
        with self._shown():
            phase = Phase(self, name, total, done, unit, main)
            self._phases.append(phase)
            try:
                yield phase
            finally:
                # show the end of short phases too
                self._bar.refresh()
                self._phases.remove(phase)
                self._bar.remove_task(phase._row)

    @contextmanager
    def over_runs(self, count: int) -> Iterator[None]:
        """Show the remaining time of `count` runs while the block runs."""
        self._began, self._runs, self._ended_runs = time.monotonic(), count, 0
        with self._shown():
            if count > 1:
                self._overall = self._bar.add_task("all runs", total=count, count="", figures="")
            try:
                yield
            finally:
                if self._overall is not None:
                    self._bar.remove_task(self._overall)
                self._overall, self._runs = None, 0

    def end_run(self) -> None:
        """Count one run as ended."""
        self._ended_runs += 1
        self._tick()

    def seconds_left(self) -> float | None:
        """Remaining seconds of all runs, or of the current one; None if unknown."""
        counted = [phase for phase in list(self._phases) if phase.main or not self._runs]
        share = self._ended_runs + sum(phase.share for phase in counted)
        gained = share - sum(phase.share_before for phase in counted)
        elapsed = time.monotonic() - self._began
        return elapsed * max(0.0, (self._runs or 1) - share) / gained if gained > 0 else None

    @contextmanager
    def _shown(self) -> Iterator[None]:
        self._open += 1
        if self._open > 1:
            try:
                yield
            finally:
                self._open -= 1
            return
        self._began = self._last_line = time.monotonic()
        self._bar.start()
        ended = threading.Event()
        watch = threading.Thread(target=self._print_lines, args=(ended,), daemon=True)
        if self._lines:
            watch.start()
        try:
            yield
        finally:
            self._open -= 1
            ended.set()
            if self._lines:
                watch.join()
            if not self._bar.disable:
                # rich 14.0 prints an empty line when a disabled bar stops
                self._bar.stop()

    def _print_lines(self, ended: threading.Event) -> None:
        """Refresh the display while a phase reports nothing."""
        while not ended.wait(SECONDS_BETWEEN_LINES / 4):
            self._tick()

    def _tick(self) -> None:
        if self._overall is not None:
            left = self.seconds_left()
            done = self._ended_runs + sum(phase.share for phase in list(self._phases) if phase.main)
            figures = "" if left is None else f"{describe_seconds(left)} left"
            count = f"{self._ended_runs} of {self._runs}"
            self._bar.update(self._overall, completed=done, count=count, figures=figures)
        now = time.monotonic()
        if self._lines and now - self._last_line >= SECONDS_BETWEEN_LINES and self._phases:
            self._last_line = now
            self.console.print(self._line(), highlight=False, markup=False)

    def _line(self) -> str:
        parts = []
        for phase in list(self._phases):
            parts.append(" ".join(part for part in (f"{phase.name}:", phase.count, phase.figures) if part))
        left = self.seconds_left()
        if left is not None:
            parts.append(f"about {describe_seconds(left)} left" + (" for all runs" if self._runs > 1 else ""))
        return "; ".join(parts)


def describe_seconds(seconds: float) -> str:
    """A duration in seconds, minutes or hours."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
