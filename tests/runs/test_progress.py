"""Phases on a terminal, and one line per minute elsewhere."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from equitape.runs import progress as module
from equitape.runs.progress import Progress, describe_seconds


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(module, "time", clock)
    return clock


def console(terminal=False):
    return Console(file=io.StringIO(), force_terminal=terminal, width=150)


def test_a_line_per_minute(clock):
    shown = console()
    progress = Progress(shown)
    with progress.phase("training", 10, unit="step", main=True) as phase:
        for step in range(1, 11):
            clock.now += 25
            phase.update(step, f"loss {step}")
    assert shown.file.getvalue().splitlines() == [
        "training: step 3 of 10 loss 3; about 175 s left".replace("175 s", "3 min"),
        "training: step 6 of 10 loss 6; about 100 s left".replace("100 s", "2 min"),
        "training: step 9 of 10 loss 9; about 25 s left",
    ]


def test_the_time_left_is_that_of_all_runs(clock):
    shown = console()
    progress = Progress(shown)
    with progress.over_runs(4):
        for _ in range(2):
            with progress.phase("loading"):
                clock.now += 10
            with progress.phase("training", 2, unit="step", main=True) as phase:
                for step in (1, 2):
                    clock.now += 45
                    phase.update(step)
            progress.end_run()
    lines = shown.file.getvalue().splitlines()
    assert lines == [
        "training: step 2 of 2; about 5 min left for all runs",
        "training: step 2 of 2; about 3 min left for all runs",
    ]


def test_what_an_earlier_process_did_does_not_count_as_speed(clock):
    progress = Progress(console())
    with progress.phase("training", 100, done=90, unit="step") as phase:
        assert progress.seconds_left() is None
        clock.now += 10
        phase.update(91)
        assert progress.seconds_left() == pytest.approx(90)


def test_a_phase_that_says_nothing_is_shown_too(clock):
    shown = console()
    progress = Progress(shown)
    with progress.phase("loading the model"):
        clock.now += 61
        progress._tick()
    assert shown.file.getvalue() == "loading the model:\n"


def test_bars_on_a_terminal(clock):
    shown = console(terminal=True)
    progress = Progress(shown)
    with progress.over_runs(2), progress.phase("scoring [all]", 4.0) as phase:
        phase.advance(1.0)
        phase.advance(2.0)
        assert phase.share == 0.75
    text = shown.file.getvalue()
    assert "scoring [all]" in text
    assert "75%" in text
    assert "all runs" in text


def test_nothing_without_a_console(capsys):
    with Progress().phase("x", 3) as phase:
        phase.update(2, "figures")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("seconds", "words"), [(3.2, "3 s"), (150, "2 min"), (7200, "2.0 h")])
def test_durations(seconds, words):
    assert describe_seconds(seconds) == words
