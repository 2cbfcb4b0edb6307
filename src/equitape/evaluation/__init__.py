"""Run evaluation tasks on a loaded model in resumable units and keep the results (docs/how-to/evaluation.md)."""

from ..tasks import EVALUATIONS, EvaluationTask, Report, Unit, available_evaluations, build_evaluation
from ..tasks.evaluated_model import EvaluatedModel, load_evaluated_model
from .runner import evaluate, rescore

__all__ = [
    "EVALUATIONS",
    "EvaluatedModel",
    "EvaluationTask",
    "Report",
    "Unit",
    "available_evaluations",
    "build_evaluation",
    "evaluate",
    "load_evaluated_model",
    "rescore",
]
