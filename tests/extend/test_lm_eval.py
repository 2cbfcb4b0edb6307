"""A task of lm-evaluation-harness in the proof."""

import importlib
import json
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

import equitape
from equitape.extend.settings import ExtendSettings
from equitape.tasks import harness

pytestmark = pytest.mark.usefixtures("no_drawing")

# equitape.extend is a function and a package
preparation = importlib.import_module("equitape.extend.prepare")
proof = importlib.import_module("equitape.extend.proof")


def test_a_task_of_lm_eval_before_and_after(room, tmp_path, monkeypatch):
    """Where it is installed: last words of held-out passages, in the tables and in the verdict."""
    pytest.importorskip("lm_eval.tasks")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    texts = {"data": [str(room / "data")], "eval_data": [str(room / "test")], "batch_size": 2}
    options = {
        **texts,
        "measure": ["perplexity", "lm-eval"],
        "compare": ["linear"],
        "steps": 1,
        "learning_rate": 1e-6,
        "query_growth": 0,
    }
    extension = equitape.extend(room / "base", 64, out=tmp_path / "out", **options)
    questions = [json.loads(line) for line in (tmp_path / "out/lm-eval/last_words.jsonl").read_text().splitlines()]
    held_out = [path.read_text() for path in (room / "test").iterdir()]
    assert len(questions) >= 10
    for each in questions:
        assert each["word"] in each["text"].split()
        assert any(f"{each['text']} {each['word']}" in text for text in held_out)
    for model in ("original", "extended", "linear"):
        report = extension.reports[model]["lm-eval"]
        assert f"last_words {len(questions)}" in report.protocol[0]
        assert report.metrics["last_words perplexity"] > 1
    first, second, third = (extension.reports[model]["lm-eval"].metrics for model in extension.reports)
    assert second["last_words perplexity"] == pytest.approx(first["last_words perplexity"], rel=0.3)
    assert third["last_words perplexity"] != first["last_words perplexity"]
    check = next(check for check in extension.verdict.checks if check.name == "lm-eval: last_words acc")
    assert check.passed
    page = (tmp_path / "out/report.md").read_text()
    assert "| lm-eval, last_words acc ↑ |" in page
    assert "| lm-eval, last_words perplexity ↓ |" in page
    # killed before this report, moved, and continued there
    out = (tmp_path / "out").rename(tmp_path / "moved")
    (out / "extended/lm-eval/report.json").unlink()
    again = equitape.extend(room / "base", 64, out=out, resume=True, **options)
    assert again.reports["extended"]["lm-eval"].metrics == second


@pytest.mark.parametrize(("after", "passed"), [(0.56, True), (0.54, False)])
def test_a_lower_score_of_lm_eval_is_no_success(after, passed):
    def report(value):
        metrics = {"score": value, "hellaswag acc": value, "hellaswag acc_stderr": 0.1}
        return SimpleNamespace(metrics=metrics, headline="score")

    (check,) = proof.check_harness(ExtendSettings(to=64), report(0.6), report(after))
    assert check.passed is passed
    assert f"60.0 before, {100 * after:.1f} after" in check.sentence


def test_without_lm_eval_a_note_says_so(monkeypatch):
    monkeypatch.setattr(proof, "find_spec", lambda name: None)
    options, notes = proof.harness_task(ExtendSettings(to=64), 50, 50)
    assert options is None
    assert "it is not installed" in notes[0]


def refuse_before_reading(room, monkeypatch, words):
    monkeypatch.setattr(preparation, "read_data", None)
    options = {"data": [str(room / "data")], "eval_data": [str(room / "test")], "harness": "hellaswagg"}
    with pytest.raises(ValueError, match=words):
        preparation.prepare(room / "base", ExtendSettings(to=64, **options))


def test_an_unknown_task_is_refused_before_texts_are_read(room, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", SimpleNamespace())
    monkeypatch.setattr(harness, "quiet_harness", nullcontext)
    monkeypatch.setattr(harness, "find_tasks", lambda *_: SimpleNamespace(all_tasks=["hellaswag"]))
    refuse_before_reading(room, monkeypatch, "no task 'hellaswagg'. Did you mean 'hellaswag'?")


def test_a_missing_lm_eval_is_refused_before_texts_are_read(room, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    refuse_before_reading(room, monkeypatch, "need the package lm-eval")


def test_a_task_that_is_not_measured_is_refused():
    with pytest.raises(ValueError, match="measure leaves out lm-eval"):
        ExtendSettings(to=64, harness="hellaswag", measure=["perplexity"])
