"""The result of `equitape extend` as dataclasses; results.json holds it, and its report is made from it."""

from dataclasses import dataclass, field
from typing import Any

from .results import EvaluationReport, Stored

ORIGINAL, EXTENDED = "original", "extended"
"""What tables and plots call the model before and after."""
RETRIEVAL = {"passkey": "passkey", "needles": "multi-key needles"}
"""Tasks of finding something in a long text, and what tables and sentences call them."""


@dataclass(frozen=True, kw_only=True)
class Check(Stored):
    """One condition of a success."""

    name: str
    passed: bool
    sentence: str
    """What was found, with its figures."""


@dataclass(frozen=True, kw_only=True)
class Verdict(Stored):
    """Whether the extension is a success."""

    success: bool
    sentence: str
    """The first line of every report: success, or what got worse."""
    checks: list[Check] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Agreement(Stored):
    """How much a model still predicts what the original does, on the same held-out tokens."""

    length: int
    """Tokens of a window."""
    tokens: int
    """Predictions compared."""
    agreement: float | None
    """Share of predictions, in per cent, whose most likely token is the original's."""
    kl: float | None
    """Mean Kullback-Leibler divergence from the original's distribution, in nats per token."""


@dataclass(frozen=True, kw_only=True)
class Extension(Stored):
    """An extended model with its plan, its figures before and after, and the verdict."""

    origin = "a results.json of equitape extend"

    base: str
    """Name of the base."""
    base_path: str
    """Where it was read from."""
    folder: str
    """Where the result lies."""
    context: int
    """Of the base, in tokens."""
    to: int
    """The new context."""
    settings: dict[str, Any]
    plan: list[dict[str, str]]
    """{name, value, reason} of every choice, estimates included."""
    short: list[int]
    """Lengths at which damage is measured."""
    verdict: Verdict
    reports: dict[str, dict[str, EvaluationReport]]
    """By model ("original", "extended", comparators), then by task."""
    agreements: dict[str, Agreement] = field(default_factory=dict)
    """By model: how far each is from the original at short lengths."""
    training: dict[str, Any] = field(default_factory=dict)
    """results.json of the fine-tuning run."""
    notes: list[str] = field(default_factory=list)
    """What a reader must know: what was left out and why."""
    environment: dict[str, Any] = field(default_factory=dict)
    chats: bool = False
    """Whether the tokenizer has a chat template."""


def perplexities(report: EvaluationReport) -> dict[str, dict[int, float | None]]:
    """Perplexity by text and length, from the report of the task perplexity."""
    names = list(report.examples["data"])
    found: dict[str, dict[int, float | None]] = {}
    for name in names:
        suffix = f"_{name}" if len(names) > 1 else ""
        found[name] = {
            length: report.metrics.get(f"perplexity{suffix}_{length}") for length in report.examples["lengths"]
        }
    return found


def scores(report: EvaluationReport) -> dict[int, float | None]:
    """The headline of passkey or needles by length."""
    return {length: report.metrics.get(f"{report.headline}_{length}") for length in report.examples["lengths"]}
