"""Tasks: make examples, score outputs. One task, one file; a file is imported when its task is first asked for."""

from typing import Any

from .base import TASKS, Curve, Evaluation, HeatMap, Task

__all__ = ["TASKS", "Curve", "Evaluation", "HeatMap", "Task", "available_tasks", "build_task"]

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


def available_tasks() -> list[str]:
    """The names that `build_task` and recipes accept."""
    return list(TASKS)


def build_task(name: str, options: dict[str, Any] | None = None) -> Task:
    """The task of a name, with options as a recipe gives them; unknown ones are refused."""
    cls = TASKS[name]
    return cls(cls.options_class.parse(options or {}, f"Task {name!r}"))
