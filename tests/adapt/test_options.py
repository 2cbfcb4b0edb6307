"""The options of `equitape adapt`, made from the settings."""

from typing import get_args

import pytest

from command_line import call, invoke
from equitape.adapt import METHODS, AdaptSettings
from equitape.commands.adapt import course_of
from equitape.settings import type_hints


def test_every_method_can_be_chosen():
    assert get_args(type_hints(AdaptSettings)["method"]) == tuple(METHODS)


def test_options_keep_their_names(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    shown = call("adapt", "--help").output
    for option in [
        "method", "context", "scaling", "theta", "train-embeddings", "no-train-embeddings", "train-norms", "lora-rank",
        "lora-alpha", "lora-dropout", "lora-target", "group-size", "tape", "seed", "data", "tokenizer", "min-tokens",
        "whole-rows", "cache", "steps", "tokens", "batch-size", "accumulation", "learning-rate", "schedule", "warmup",
        "weight-decay", "precision", "gradient-checkpointing", "compile", "save-every", "eval-every", "eval-data",
        "eval-lengths", "eval-windows", "eval-stride", "out", "save", "adapter", "dtype", "resume", "dry-run", "json",
    ]:  # fmt: skip
        assert f"--{option} " in shown, option
    assert "Default: 8." in shown


@pytest.mark.parametrize(
    ("options", "given"),
    [
        (["--theta", "1e6"], {"theta": 1e6}),
        (["--tape", "theta=1e6", "--tape", "layers=0,1"], {"tape": {"theta": 1e6, "layers": [0, 1]}}),
        (["--lora-target", "q_proj", "--lora-target", "k_proj"], {"lora_targets": ["q_proj", "k_proj"]}),
        (["--no-train-norms"], {"train_norms": False}),
        ([], {}),
    ],
)
def test_what_is_given_reaches_the_settings(options, given, monkeypatch):
    seen = {}

    def build(base, method, adapter, dtype):
        seen.update(method)
        raise ValueError("stop here")

    monkeypatch.setattr("equitape.commands.adapt.load", build)
    call("adapt", "base", *options, code=2)
    assert seen == given


@pytest.mark.parametrize("option", ["--theta", "--lora-alpha"])
@pytest.mark.parametrize("value", [".nan", ".inf"])
def test_numbers_are_finite(option, value):
    assert "must be a finite number" in invoke("adapt", "base", "--method", "lora", option, value, code=2)


def test_the_run_gets_the_defaults_of_fine_tuning():
    settings = AdaptSettings(method="tape", seed=3)
    course = course_of(settings, {"data": ["x"]}, {"steps": 2}, {"windows": 0})
    assert (course.train.batch_size, course.train.learning_rate, course.train.seed) == (8, 2e-3, 3)
    assert course.evaluation.windows is None


@pytest.mark.parametrize(
    ("method", "rate"), [({}, 1e-3), ({"method": "tape", "train_norms": True}, 1e-3), ({"method": "theta"}, 2e-5)]
)
def test_defaults_follow_the_measurements(method, rate):
    """docs/results/extension-smollm2.md: tape+lora at 1e-3 was the best on long text, tape alone the worst."""
    settings = AdaptSettings(**method)
    assert settings.method == method.get("method", "tape+lora")
    assert course_of(settings, {"data": ["x"]}, {"steps": 2}, {}).train.learning_rate == rate
