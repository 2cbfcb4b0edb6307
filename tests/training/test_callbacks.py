"""The clock, the counts of tokens and memory, and the random numbers during the steps of a run."""

import io
import random
from functools import partial
from types import SimpleNamespace

import numpy
import pytest
import torch
from rich.console import Console
from tiny import numbered, read_lines, settings, small_model

from equitape.runs import progress
from equitape.runs.progress import Progress
from equitape.tasks.base import pad_right
from equitape.training import callbacks, checkpoints
from equitape.training.callbacks import Bookkeeper, Meter, untouched_generators
from equitape.training.fit import fit
from equitape.training.log import StepLog


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still unless a test moves it."""
    clock = SimpleNamespace(now=50.0)
    clock.perf_counter = clock.monotonic = lambda: clock.now
    monkeypatch.setattr(callbacks, "time", clock)
    monkeypatch.setattr(progress, "time", clock)
    return clock


def keeper_of(meter, tmp_path):
    log = StepLog(None, lambda table: table, 1)
    with Progress().phase("training") as phase:
        return Bookkeeper(log, settings(), tmp_path, meter, None, phase)


def test_lines_where_no_bar_can_be_shown(clock, tmp_path):
    """Every step takes 25 seconds: a line after the third and the sixth, none on a terminal."""
    printed = {}
    for terminal in (False, True):
        model = small_model()
        model.register_forward_pre_hook(lambda module, inputs: setattr(clock, "now", clock.now + 25 * module.training))
        printed[terminal] = io.StringIO()
        console = Console(file=printed[terminal], width=200, force_terminal=terminal)
        collate = partial(pad_right, pad_token_id=0)
        fit(
            model,
            numbered(),
            settings(steps=7, logging_steps=1),
            tmp_path / str(terminal),
            collate=collate,
            progress=Progress(console),
        )
    lines = [line for line in printed[False].getvalue().splitlines() if line.startswith("training")]
    assert [line.partition(" loss")[0] for line in lines] == ["training: step 3 of 7", "training: step 6 of 7"]
    assert all("loss " in line and "tokens/s" in line for line in lines)
    assert "training: step 3" not in printed[True].getvalue()


@pytest.mark.parametrize("slow", ["evaluation", "saving", "nothing"])
def test_seconds_are_those_of_steps_alone(slow, clock, tmp_path, monkeypatch):
    """Every step takes a second; evaluations, after steps 2 and 4, and saving, after step 3, take hours."""
    publish = checkpoints.publish
    model = small_model()

    def step(module, inputs):
        clock.now += module.training

    def evaluate(model, step):
        clock.now += 10_000 * (slow == "evaluation")
        return {}

    def save(*arguments):
        clock.now += 10_000 * (slow == "saving")
        publish(*arguments)

    model.register_forward_pre_hook(step)
    monkeypatch.setattr(checkpoints, "publish", save)
    given = settings(steps=5, eval_steps=2, save_steps=3, logging_steps=1)
    result = fit(model, numbered(), given, tmp_path, collate=partial(pad_right, pad_token_id=0), evaluate=evaluate)
    assert clock.now - 50 == 5 + {"evaluation": 20_000, "saving": 20_000, "nothing": 0}[slow]
    assert result.seconds == 5
    # the first step, which may compile, is left out of the speed
    tokens = [len(numbered()[index]["input_ids"]) for index in range(5 * 8)]
    assert result.tokens == sum(tokens)
    assert result.tokens_per_second == sum(tokens[8:]) / 4
    assert [line["tokens"] for line in read_lines(tmp_path) if "tokens" in line] == [
        sum(tokens[:count]) for count in range(8, 41, 8)
    ]


def test_a_budget_in_minutes_ends_the_run_and_its_schedule(clock, tmp_path):
    model = small_model()
    model.register_forward_pre_hook(lambda module, inputs: setattr(clock, "now", clock.now + 3 * module.training))
    given = settings(steps=None, minutes=1.0)
    result = fit(model, numbered(), given, tmp_path, collate=partial(pad_right, pad_token_id=0))
    assert result.status == "done"
    # it ends with the step that spends the budget
    assert (result.seconds, result.steps) == (60, 20)
    rates = [line["learning_rate"] for line in read_lines(tmp_path)]
    assert rates[0] < max(rates)
    assert rates[-1] < 0.2 * max(rates)


@pytest.mark.parametrize(("saving", "expected"), [(0, [20, 40, 60]), (9, [20, 60])])
def test_a_checkpoint_per_minute_unless_saving_is_slow(saving, expected, clock, tmp_path, monkeypatch):
    """An interruption loses a minute, in a run with a budget in minutes too; here every step takes three seconds."""
    model, saved, publish = small_model(), [], checkpoints.publish
    model.register_forward_pre_hook(lambda module, inputs: setattr(clock, "now", clock.now + 3 * module.training))

    def save(partial, *arguments):
        saved.append(checkpoints.step_of(partial))
        clock.now += saving
        publish(partial, *arguments)

    monkeypatch.setattr(checkpoints, "publish", save)
    given = settings(steps=None, minutes=3.0, save_steps=None)
    fit(model, numbered(), given, tmp_path, collate=partial(pad_right, pad_token_id=0))
    assert saved == expected


def test_speed_counts_each_token_once(tmp_path):
    meter = Meter()
    keeper = keeper_of(meter, tmp_path)
    # a slow start, then 100 tokens per second
    for seconds, tokens in [(60, 100), (1, 100), (1, 100), (3, 300)]:
        meter.seconds += seconds
        keeper.log.tokens += tokens
        keeper._measure([{"step": 1}])
    assert (meter.tokens, meter.seconds) == (600, 65)
    assert (meter.steady_tokens, meter.steady_seconds) == (500, 5)
    assert meter.tokens_per_second == 100


def test_speed_of_a_run_that_is_read_once():
    """There is no reading after the start to leave it out with."""
    assert Meter(seconds=4.0, tokens=100).tokens_per_second == 25


@pytest.mark.parametrize(
    ("before", "now", "kept"),
    [(None, 5.0, 5.0), (9.0, 5.0, 9.0), (3.0, 5.0, 5.0), (9.0, None, 9.0), (None, None, None)],
)
def test_memory_is_the_most_that_was_held(before, now, kept, tmp_path, monkeypatch):
    """Also before an interruption, which begins the system's own count anew."""
    monkeypatch.setattr(callbacks, "peak_mib", lambda: now)
    meter = Meter(peak_mib=before)
    keeper_of(meter, tmp_path)._measure([])
    assert meter.peak_mib == kept


@pytest.mark.parametrize("draw", [random.random, numpy.random.random, lambda: float(torch.rand(()))])
def test_an_evaluation_takes_no_random_numbers_from_training(draw):
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    undisturbed = [draw() for _ in range(6)]
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    found = [draw() for _ in range(3)]
    with untouched_generators():
        drawn = [draw() for _ in range(2)]
    found += [draw() for _ in range(3)]
    assert found == undisturbed
    assert drawn == undisturbed[3:5]
