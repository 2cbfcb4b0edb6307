"""Tasks: what models are trained on and what they are evaluated on. A file is imported when its task is first used.

A training task (`Task`) makes examples and scores a model trained on them; recipes name it. An evaluation task
(`EvaluationTask`) scores any model that equitape loads, in units that can be resumed; `equitape eval --task` names it.
A name may stand for both.
"""

from typing import Any

from .base import TASKS, Curve, Evaluation, HeatMap, Task
from .evaluation import EVALUATIONS, EvaluationTask, Report, Unit, build_evaluation

__all__ = [
    "EVALUATIONS",
    "TASKS",
    "Curve",
    "Evaluation",
    "EvaluationTask",
    "HeatMap",
    "Report",
    "Task",
    "Unit",
    "abilities",
    "available_evaluations",
    "available_tasks",
    "build_evaluation",
    "build_task",
]

for _name, _place in {
    "addition": "addition:Addition",
    "multiplication": "multiplication:Multiplication",
    "copy": "copying:Copy",
    "reverse": "copying:Reverse",
    "selective_copy": "copying:SelectiveCopy",
    "flip_flop": "flip_flop:FlipFlop",
    "retrieval": "retrieval:Retrieval",
    "parity": "parity:Parity",
    "s5": "groups:S5",
    "a5": "groups:A5",
    "text": "text:Text",
    "scrolls": "scrolls:Scrolls",
}.items():
    TASKS.register(_name, f"{__name__}.{_place}")

for _name, _place in {
    "perplexity": "perplexity_by_length:Perplexity",
    "passkey": "passkey:Passkey",
    "needles": "needles:Needles",
    "scrolls": "scrolls_evaluation:Scrolls",
    "lm-eval": "harness:Harness",
}.items():
    EVALUATIONS.register(_name, f"{__name__}.{_place}")


def available_tasks() -> list[str]:
    """The names that `build_task` and recipes accept."""
    return list(TASKS)


def available_evaluations() -> list[str]:
    """The names that `build_evaluation` accepts; some need a part after a colon, for example scrolls:qmsum."""
    return list(EVALUATIONS)


def abilities() -> dict[str, str]:
    """Every task, with what it can do: "train", "evaluate" or "both"."""
    found = dict.fromkeys(TASKS, "train") | dict.fromkeys(EVALUATIONS, "evaluate")
    both = dict.fromkeys((name for name in TASKS if name in EVALUATIONS), "both")
    return dict(sorted((found | both).items()))


def build_task(name: str, options: dict[str, Any] | None = None) -> Task:
    """Build a training task from its name and the options of a recipe; unknown options are refused."""
    if name in EVALUATIONS and name not in TASKS:
        raise ValueError(
            f"Task {name!r} cannot be trained on; use it with equitape eval MODEL --task {name}. Tasks for training: "
            f"{', '.join(TASKS)}."
        )
    cls = TASKS[name]
    return cls(cls.options_class.parse(options or {}, f"Task {name!r}"))
