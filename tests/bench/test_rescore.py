"""Trained runs are scored again: as before without growth, and differently with it."""

import json
import runpy
import sys
from pathlib import Path

from equitape.training.checked import check_recipe
from equitape.training.recipe import parse_recipe
from equitape.training.run import execute

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "rescore.py"


def test_scores_with_and_without_growth(monkeypatch, tmp_path):
    text = {"name": "text", "train": "shipped:valid", "valid": "shipped:valid", "tokenizer": "bytes", "length": 32}
    recipe = parse_recipe(
        {
            "task": {**text, "factors": [1, 2], "eval_tokens": 1000},
            "model": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
            "encodings": ["rope"],
            "train": {"steps": 2, "batch_size": 4},
        }
    )
    result = execute(check_recipe(recipe), "rope", 3, tmp_path / "run")

    def scores(*words):
        out = tmp_path / "scores.json"
        words = [SCRIPT, tmp_path / "run", "--start", 4, "--out", out, "--growth", *words]
        monkeypatch.setattr(sys, "argv", list(map(str, words)))
        runpy.run_path(str(SCRIPT), run_name="__main__")
        return json.loads(out.read_text())

    plain, grown = scores(0, 5)
    assert (plain["label"], plain["seed"], plain["growth"], grown["growth"]) == ("rope", 3, 0, 5)
    for name in ("bits_per_byte_1x", "bits_per_byte_outside_2x"):
        assert plain["metrics"][name] == result.evaluation.metrics[name]
        assert grown["metrics"][name] != plain["metrics"][name]
    (shorter,) = scores(0, "--task", "factors=[1]")
    assert "bits_per_byte_outside_2x" not in shorter["metrics"]
