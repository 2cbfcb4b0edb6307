"""Tasks: what models are trained on and what they are evaluated on. A file is imported when its task is first used.

A training task (`Task`) makes examples and scores a model trained on them; recipes name it. An evaluation task
(`EvaluationTask`) scores any model that equitape loads, in units that can be resumed; `equitape eval --task` names it.
A name may stand for both.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from ..registry import Registry, describe_choices
from ..runs.results import Report
from ..settings import describe_settings
from ..values import parse_value, split_pair
from .base import Curve, Evaluation, HeatMap, Task
from .evaluation import EvaluationTask, Unit

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
    "build_evaluations",
    "build_task",
]

TASKS: Registry[type[Task]] = Registry("task")
EVALUATIONS: Registry[type[EvaluationTask]] = Registry("evaluation task")

for _name, _to_train, _to_evaluate in (
    ("addition", "addition:Addition", None),
    ("multiplication", "multiplication:Multiplication", None),
    ("copy", "copying:Copy", None),
    ("reverse", "copying:Reverse", None),
    ("selective_copy", "copying:SelectiveCopy", None),
    ("flip_flop", "flip_flop:FlipFlop", None),
    ("retrieval", "retrieval:Retrieval", None),
    ("parity", "parity:Parity", None),
    ("s5", "groups:S5", None),
    ("a5", "groups:A5", None),
    ("text", "text:Text", None),
    ("scrolls", "scrolls:Scrolls", "scrolls_evaluation:Scrolls"),
    ("perplexity", None, "perplexity_by_length:Perplexity"),
    ("passkey", None, "needles:Passkey"),
    ("needles", None, "needles:Needles"),
    ("lm-eval", None, "harness:Harness"),
):
    if _to_train:
        TASKS.register(_name, f"{__name__}.{_to_train}")
    if _to_evaluate:
        EVALUATIONS.register(_name, f"{__name__}.{_to_evaluate}")


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


def evaluation_class(name: str) -> type[EvaluationTask]:
    """The class of an evaluation task, by its name with or without a part."""
    kind = name.partition(":")[0]
    if kind in TASKS and kind not in EVALUATIONS:
        raise ValueError(
            f"Task {kind!r} scores the models that are trained on it; use it with equitape train or compare. Tasks to "
            f"evaluate other models: {', '.join(EVALUATIONS)}."
        )
    return EVALUATIONS[kind]


def build_evaluation(name: str, options: dict[str, Any] | None = None) -> EvaluationTask:
    """The evaluation of a name such as "passkey" or "scrolls:qmsum", with options as plain data."""
    cls = evaluation_class(name)
    kind, colon, part = name.partition(":")
    if colon and not (cls.parts or cls.any_part):
        raise ValueError(f"The task {kind!r} has no parts; leave out {':' + part!r}.")
    if cls.any_part and not part:
        raise ValueError(f"The task {kind!r} needs the name of a task after a colon: {kind}:NAME.")
    if cls.parts and part not in cls.parts:
        raise ValueError(f"The task {kind!r} has no part {part!r}.{describe_choices(part, cls.parts)}")
    return cls(cls.options_class.parse(options or {}, f"Task {kind!r}"), part or None)


def build_evaluations(names: Sequence[str], overrides: Iterable[str]) -> list[EvaluationTask]:
    """Evaluation tasks with options from the command line.

    overrides: key=value for all tasks that have such an option, or TASK.key=value for one of them.
    """
    known = {name: list(describe_settings(evaluation_class(name).options_class)) for name in names}
    options: dict[str, dict[str, Any]] = {name: {} for name in names}
    for override in overrides:
        path, text = split_pair(override, "lengths=1024,8192")
        owner, dot, key = path.rpartition(".")
        if dot and owner not in options:
            raise ValueError(f"{override!r}: there is no task {owner!r} here.{describe_choices(owner, options)}")
        taking = [owner] if dot else [name for name in names if key in known[name]]
        if not taking:
            choices = describe_choices(key, set().union(*known.values()))
            raise ValueError(f"No task here has an option {key!r}.{choices}")
        for name in taking:
            options[name][key] = parse_value(text, f"The value of {path}")
    return [build_evaluation(name, options[name]) for name in names]
