"""Runs are added to a comparison: in the recipe's order, under the right labels, and only if they fit."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from equitape.training.checked import check_recipe
from equitape.training.compare import compare
from equitape.training.recipe import load_recipe, parse_recipe, resolved
from equitape.training.run import execute

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "add_runs.py"


def recipe(*encodings, **train):
    task = {"name": "addition", "trained_digits": 2, "tested_digits": 3, "samples": 2}
    model = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    train = {"steps": 2, "batch_size": 4, **train}
    return parse_recipe(
        {"name": "beyond-addition-growth", "task": task, "model": model, "encodings": list(encodings), "train": train}
    )


def add(monkeypatch, results, *words):
    monkeypatch.setattr(
        sys, "argv", [str(SCRIPT), "beyond-addition-growth", *map(str, words), "--results", str(results)]
    )
    runpy.run_path(str(SCRIPT), run_name="__main__")


def test_runs_are_added(monkeypatch, tmp_path):
    results = tmp_path / "results"
    compare(check_recipe(recipe("nope", "rope")), results / "beyond-addition-growth")
    execute(check_recipe(recipe("fire")), "fire", 0, tmp_path / "one")
    jumping = recipe({"kind": "rope", "label": "rope, jumps"})
    execute(check_recipe(jumping), "rope, jumps", 0, tmp_path / "two")
    execute(check_recipe(recipe("fire", steps=3)), "fire", 0, tmp_path / "longer")

    with pytest.raises(SystemExit, match=r"train\.steps was 2, now 3"):
        add(monkeypatch, results, tmp_path / "longer")
    add(monkeypatch, results, tmp_path / "two", tmp_path / "one", "--label", "one=fire, jumps", "--remark", "A remark.")
    found = json.loads((results / "beyond-addition-growth/results.json").read_text())
    # rope and fire without jumps are not in the packaged recipe
    assert [run["label"] for run in found["runs"]] == ["nope", "fire, jumps", "rope, jumps", "rope"]
    assert found["recipe"]["encodings"] == resolved(load_recipe("beyond-addition-growth"))["encodings"]
    missing, remark = found["remarks"]
    assert missing.startswith("Not run yet: rope, half decay, jumps; cope; ")
    assert "fire, jumps" not in missing
    assert remark == "A remark."
    assert "- A remark.\n" in (results / "beyond-addition-growth/report.md").read_text()

    add(monkeypatch, results, tmp_path / "one", "--remark", "A remark.")
    again = json.loads((results / "beyond-addition-growth/results.json").read_text())
    assert [run["label"] for run in again["runs"]] == ["nope", "fire, jumps", "rope, jumps", "rope", "fire"]
    assert again["remarks"][1:] == ["A remark."]


def test_another_encoding_under_a_label_is_refused(monkeypatch, tmp_path):
    for seed, kind in enumerate(("fire", "rope")):
        given = recipe({"kind": kind, "label": "same", "seeds": [seed]})
        execute(check_recipe(given), "same", seed, tmp_path / kind)
    with pytest.raises(SystemExit, match=r"same, seed 1: another encoding than an earlier seed's: .*kind was"):
        add(monkeypatch, tmp_path / "results", tmp_path / "fire", tmp_path / "rope")
    with pytest.raises(SystemExit, match="--label names nowhere, but no such folder is given"):
        add(monkeypatch, tmp_path / "results", tmp_path / "fire", "--label", "nowhere=x")


def test_the_first_run_begins_a_comparison(monkeypatch, tmp_path):
    execute(check_recipe(recipe("fire")), "fire", 0, tmp_path / "one")
    add(monkeypatch, tmp_path / "results", tmp_path / "one")
    found = json.loads((tmp_path / "results/beyond-addition-growth/results.json").read_text())
    assert [run["label"] for run in found["runs"]] == ["fire"]
    assert (found["recipe"]["name"], found["recipe"]["train"]["steps"]) == ("beyond-addition-growth", 2)
    assert found["remarks"][0].startswith("Not run yet: rope, half decay, jumps; nope; ")
    assert (tmp_path / "results/beyond-addition-growth/report.md").is_file()
