"""Results as dataclasses: what is read is what was written, older files included, and metrics declare their direction."""

import json
from pathlib import Path

import pytest

from equitape.runs.results import (
    ERROR,
    EXACT_MATCH,
    KNOWN_METRICS,
    Comparison,
    EvaluationReport,
    Metric,
    RunResult,
    TaskResult,
    find_metric,
)
from equitape.tasks import TASKS

SAVED = Path(__file__).parent.parent / "fixtures" / "saved"


def saved(*path):
    return json.loads(SAVED.joinpath(*path).read_text())


def test_results_of_a_comparison():
    content = saved("comparison", "results.json")
    read = Comparison.read(SAVED / "comparison" / "results.json")
    written = read.to_dict()
    # the file is older than declared metrics, warnings and remarks
    assert written.pop("remarks") == []
    assert written["task"].pop("warning") == ""
    assert written["task"].pop("metrics") == [metric.__dict__ for metric in KNOWN_METRICS]
    assert written == content
    assert Comparison.from_dict(read.to_dict()) == read
    assert [(run.label, run.seed, run.done) for run in read.runs][:2] == [("rope", 0, True), ("rope", 1, True)]
    assert read.runs[0].metric("exact_match_grid") == content["runs"][0]["evaluation"]["metrics"]["exact_match_grid"]
    assert read.task.metric("exact_match_outside") == EXACT_MATCH


def test_result_of_a_run():
    content = saved("comparison", "runs", "rope-seed0", "run.json")
    read = RunResult.from_dict(content)
    assert read.to_dict() == content
    assert read.evaluation.heat_maps[0].values == content["evaluation"]["heat_maps"][0]["values"]
    # a later version may know more
    assert RunResult.from_dict({**content, "colour": "red"}) == read


def test_a_run_that_was_not_made():
    run = RunResult(label="tape", encoding={"kind": "tape"}, seed=3)
    assert (run.status, run.done, run.metric("loss")) == ("missing", False, None)
    assert RunResult.from_dict(run.to_dict()) == run


def test_report_of_an_evaluation():
    content = saved("evaluation", "report.json")
    read = EvaluationReport.read(SAVED / "evaluation" / "report.json")
    written = read.to_dict()
    # fields that came later
    del written["declared"], written["intervals"]
    assert all(curve.pop("low") is None and curve.pop("high") is None for curve in written["curves"])
    assert written == content
    assert EvaluationReport.from_dict(read.to_dict()) == read
    assert read.metric("perplexity_32").higher_is_better is False


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"runs": 3, "task": 4}'])
@pytest.mark.parametrize("kind", [Comparison, EvaluationReport])
def test_other_files_are_refused(kind, text, tmp_path):
    path = tmp_path / "file.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"file.json is not a (results|report).json of equitape (compare|eval)"):
        kind.read(path)


def test_the_most_specific_declaration_counts():
    loss = Metric(name="error_loss", higher_is_better=None)
    assert find_metric((ERROR, loss), "error_loss_outside") == loss
    assert find_metric((ERROR, loss), "error_outside") == ERROR
    assert find_metric((ERROR, loss), "errors").higher_is_better is None


def test_a_headline_that_is_not_declared_has_the_direction_of_its_task():
    task = TaskResult(name="own", headline="steps", higher_is_better=False, metrics=())
    assert task.metric("steps").higher_is_better is False
    assert task.metric("other").higher_is_better is None


@pytest.mark.parametrize("name", sorted(TASKS))
def test_every_task_declares_its_headline(name):
    cls = TASKS[name]
    assert find_metric(cls.metrics, cls.headline).higher_is_better is cls.higher_is_better
