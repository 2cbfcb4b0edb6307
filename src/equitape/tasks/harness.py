"""Tasks of lm-evaluation-harness as an evaluation: `equitape eval MODEL --task lm-eval:NAME`.

`equitape.evaluation.harness` is the other direction: the harness's command line with models of equitape.
"""

import hashlib
import json
import math
from dataclasses import dataclass, replace
from typing import Any

from ..runs.errors import first_line
from ..runs.files import make_directory
from ..runs.folders import file_name
from ..runs.results import Bars, Metric, Report
from ..settings import Settings
from .evaluated_model import EvaluatedModel
from .evaluation import Advance, EvaluationTask, Record, Unit
from .harness_model import COUNTED, quiet_harness, wrap

COUNTS = ("sample_len", "sample_count")


@dataclass(frozen=True, kw_only=True)
class HarnessOptions(Settings):
    """Options for lm-evaluation-harness; its own defaults apply."""

    num_fewshot: int | None = None
    """Few-shot examples before each question; default: the task's."""
    limit: int | None = None
    """Maximum examples per task; default: all."""
    batch_size: int | str = 1
    """Requests per batch; "auto" finds the largest that fits."""
    include_path: str | None = None
    """Folder with more tasks in YAML."""
    max_length: int | None = None
    """Maximum tokens per request, longer ones are cut; default: the model's context."""
    bootstrap: int = 0
    """Resamplings for standard errors of metrics that have no formula; default: none."""


class Harness(EvaluationTask):
    """Tasks of lm-evaluation-harness."""

    name = "lm-eval"
    idea = "tasks of lm-evaluation-harness, as lm-eval:NAME or lm-eval:NAME,NAME, where it is installed"
    options_class = HarnessOptions
    options: HarnessOptions
    headline = "score"
    # on the harness's scale, usually 0 to 1
    metrics = (Metric(name="score", higher_is_better=True),)
    any_part = True
    part: str

    def check_scoring(self) -> None:
        require_harness()

    def check_data(self) -> None:
        if hasattr(self, "loaded"):
            return
        require_harness()
        names = [name.strip() for name in self.part.split(",")]
        with quiet_harness():
            self.manager = find_tasks(names, self.options.include_path)
            known = set(self.manager.all_tasks)
            for name in names:
                if name not in known:
                    raise ValueError(f"lm-evaluation-harness has no task {name!r}.{near(name, known)}")
            self.loaded = {name: load_task(name, self.manager) for name in names}

    def prepare(self, evaluated: EvaluatedModel) -> list[Unit]:
        self.check_data()
        evaluated.check_table(self.options.max_length or 0)
        return [Unit(key=name, length=evaluated.context or 1) for name in self.loaded]

    def digest(self) -> str | None:
        """Of all questions and answers, but for those of groups, which the harness loads later."""
        found = hashlib.sha256()
        for task in (each for tasks in self.loaded.values() for each in tasks if not isinstance(each, str)):
            for doc in task.eval_docs:
                asked = [task.doc_to_text(doc), task.doc_to_target(doc), doc]
                found.update(json.dumps(asked, sort_keys=True, default=str).encode())
        return found.hexdigest()

    def answer(self, evaluated: EvaluatedModel, units: list[Unit], batch_tokens: int, advance: Advance) -> list[Record]:
        with quiet_harness():
            model = wrap(evaluated, self.options.batch_size, self.options.max_length)
            return [self._answer(model, unit, advance) for unit in units]

    def _answer(self, model: Any, unit: Unit, advance: Advance) -> Record:
        """One task. Answers to its requests are kept in `self.unfinished` until the record is written."""
        import lm_eval

        left = unit.cost

        def on_answer(share: float) -> None:
            nonlocal left
            done = min(left, share * unit.cost)
            left -= done
            advance(done)

        model.on_answer = on_answer
        kept, resumed = None, False
        if self.unfinished is not None:
            make_directory(self.unfinished)
            kept = self.unfinished / file_name(unit.key)
            resumed = any(self.unfinished.glob(f"{kept.name}_rank*"))
        found = lm_eval.simple_evaluate(
            model=model,
            tasks=self.loaded[unit.key],
            num_fewshot=self.options.num_fewshot,
            limit=self.options.limit,
            task_manager=self.manager,
            bootstrap_iters=self.options.bootstrap,
            use_cache=None if kept is None else str(kept),
            log_samples=False,
        )
        assert found is not None
        advance(left)
        return {
            "task": unit.key,
            "results": {name: plain_results(values) for name, values in found["results"].items()},
            "higher_is_better": found.get("higher_is_better", {}),
            "samples": {name: count["effective"] for name, count in found.get("n-samples", {}).items()},
            "cut": {**model.take_counts(), "resumed": resumed},
            "versions": {name: str(version) for name, version in found.get("versions", {}).items()},
            "lm_eval": lm_eval.__version__,
        }

    def report(self, records: list[Record], facts: dict[str, Any]) -> Report:
        metrics: dict[str, float] = {}
        for record in records:
            for task, values in record["results"].items():
                metrics |= {f"{task} {name}": value for name, value in values.items()}
        declared = [metric for record in records for metric in directions(record)]
        main = main_metric(declared)
        shots = self.options.num_fewshot
        counted = {task: count for record in records for task, count in record["samples"].items()}
        return Report(
            protocol=[
                f"lm-evaluation-harness {records[0]['lm_eval']}, "
                f"{'worked examples as each task says' if shots is None else f'{shots} worked examples'}; questions: "
                + ", ".join(f"{task} {count}" for task, count in counted.items())
                + ".",
                f"Metrics are named and scaled as the harness does; 'score' is {main.name}.",
            ],
            metrics={"score": metrics[main.name], **metrics},
            short={"score": metrics[main.name]},
            declared=(replace(main, name="score"), *declared),
            bars=bars_of({task: values for record in records for task, values in record["results"].items()}),
            notes=[
                "The tasks of the harness are short-context tasks unless their names say otherwise.",
                # missing in records of earlier versions
                *describe_cuts([record["cut"] for record in records if "cut" in record]),
            ],
        )


def directions(record: Record) -> list[Metric]:
    """Which way each metric of a task is better, as the task says; None for standard errors and in old records."""
    known = record.get("higher_is_better", {})
    return [
        Metric(name=f"{task} {name}", higher_is_better=known.get(task, {}).get(name.partition(",")[0]))
        for task, values in record["results"].items()
        for name in values
    ]


def main_metric(metrics: list[Metric]) -> Metric:
    """The harness declares none: the first one that is better if higher, or else the first."""
    figures = [metric for metric in metrics if "stderr" not in metric.name]
    return next((metric for metric in figures if metric.higher_is_better), figures[0])


def describe_cuts(counts: list[dict[str, int]]) -> list[str]:
    """How many requests the harness cut because they were too long."""
    if not counts:
        return []
    requests, cut, tokens = (sum(count[name] for count in counts) for name in COUNTED)
    limit = f"{counts[0]['max_length']} tokens with"
    since = " Requests before the last interruption are not counted." if any(c.get("resumed") for c in counts) else ""
    if not cut:
        return [f"No request was longer than {limit} its answer; nothing was cut.{since}"]
    return [
        f"{cut} of {requests} requests were longer than {limit} their answer, and the harness cut their beginning: "
        f"{tokens} tokens in all.{since}"
    ]


def bars_of(results: dict[str, dict[str, float | None]]) -> list[Bars]:
    """One chart per metric, since scales differ, with all tasks that have it."""
    names = dict.fromkeys(name for values in results.values() for name in values if "stderr" not in name)
    pictures = []
    for name in names:
        metric, comma, answers = name.partition(",")
        scored = {task: values for task, values in results.items() if name in values}
        values = [_number(found[name]) for found in scored.values()]
        errors = [_number(found.get(f"{metric}_stderr{comma}{answers}")) for found in scored.values()]
        pictures.append(
            Bars(
                title=f"lm-evaluation-harness: {name}",
                row_label="task",
                rows=list(scored),
                value_label=name,
                values=values,
                most=1.0 if all(0 <= value <= 1 for value in values) else None,
                errors=None if all(map(math.isnan, errors)) else errors,
            )
        )
    return pictures


def _number(value: float | None) -> float:
    """NaN for null, which files have in its place."""
    return math.nan if value is None else value


def plain_results(values: dict[str, Any]) -> dict[str, float]:
    """The numbers of a result: "acc,none" becomes "acc"."""
    return {
        name.removesuffix(",none"): float(value)
        for name, value in values.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and name not in COUNTS
    }


def find_tasks(names: list[str], include_path: str | None) -> Any:
    """The harness's task index. Only the folder is read if it has all tasks, since the full index is slow."""
    from lm_eval.tasks import TaskManager

    if include_path is not None:
        manager = TaskManager(include_path=include_path, include_defaults=False)
        if set(names) <= set(manager.all_tasks):
            return manager
    return TaskManager(include_path=include_path)


def load_task(name: str, manager: Any) -> list[Any]:
    """A task with its data; groups stay names, which the harness resolves."""
    from lm_eval.api.task import Task

    try:
        found = manager.load_task_or_group([name])
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        # errors of the Hub, its cache, and packages of single tasks
        raise ValueError(
            f"lm-evaluation-harness cannot load its task {name!r} ({first_line(error)}). It takes data from the "
            f"Hugging Face Hub: run it once where there is a network, or name a folder of tasks in YAML "
            f"that have local data by include_path=FOLDER."
        ) from None
    alone = [task for task in found.values() if isinstance(task, Task)]
    return alone if len(alone) == len(found) == 1 else [name]


def near(name: str, known: set[str]) -> str:
    """The closest names; listing all would be thousands."""
    from difflib import get_close_matches

    found = get_close_matches(name, sorted(known), n=3)
    return f" Did you mean {' or '.join(map(repr, found))}?" if found else " List them with: lm_eval ls tasks"


def require_harness() -> None:
    """Raise ValueError if lm-evaluation-harness is not installed."""
    try:
        import lm_eval  # noqa: F401
    except ImportError:
        raise ValueError(
            'Tasks of lm-evaluation-harness need the package lm-eval; install it with pip install "equitape[eval]".'
        ) from None
