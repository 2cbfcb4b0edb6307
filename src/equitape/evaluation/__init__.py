"""What a model can do with long input, by the field's own protocols; a task is imported when it is first asked for."""

from .base import EVALUATIONS, EvaluationTask, Grid, Report, Unit, build_evaluation
from .runner import evaluate, rescore
from .subject import Subject, load_subject

__all__ = [
    "EVALUATIONS",
    "EvaluationTask",
    "Grid",
    "Report",
    "Subject",
    "Unit",
    "available_evaluations",
    "build_evaluation",
    "evaluate",
    "load_subject",
    "rescore",
]

for _name, _place in {
    "perplexity": "perplexity:Perplexity",
    "passkey": "passkey:Passkey",
    "needles": "needles:Needles",
    "scrolls": "scrolls:Scrolls",
    "lm-eval": "harness:Harness",
}.items():
    EVALUATIONS.register(_name, f"{__name__}.{_place}")


def available_evaluations() -> list[str]:
    """The names that `build_evaluation` accepts; some take a part behind a colon, as scrolls:qmsum."""
    return list(EVALUATIONS)
