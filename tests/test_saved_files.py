"""Files written by version 0.1 still load: one of each kind is kept in tests/fixtures/saved."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from equitape import EquitapeForCausalLM, load_adapter
from equitape.evaluation import rescore
from equitape.training.checked import check_recipe
from equitape.training.compare import compare
from equitape.training.recipe import load_recipe, resolved
from equitape.training.run import execute

SAVED = Path(__file__).parent / "fixtures" / "saved"


@pytest.fixture
def copied(tmp_path):
    """A folder of a kind, to write into."""
    return lambda kind: Path(shutil.copytree(SAVED / kind, tmp_path / kind))


def saved_json(*path):
    return json.loads(SAVED.joinpath(*path).read_text())


def test_model():
    model = EquitapeForCausalLM.from_pretrained(SAVED / "model")
    assert model.config.encoding["kind"] == "tape"
    assert torch.isfinite(model(torch.arange(1, 6)[None]).logits).all()


def test_adapter():
    model = load_adapter(SAVED / "base", SAVED / "adapter")
    assert model.config.context == 64
    assert torch.isfinite(model(torch.arange(1, 6)[None]).logits).all()


def test_recipe_of_a_run_folder():
    recipe = load_recipe(SAVED / "comparison" / "recipe.yaml")
    assert [choice.label for choice in recipe.choices] == ["rope", "tape, two orders"]
    written = saved_json("comparison", "results.json")["recipe"]
    assert recipe == load_recipe(SAVED / "comparison" / "recipe.yaml", [f"seeds={written['seeds']}"])
    assert resolved(recipe)["train"]["steps"] == 4


def test_checkpoint_of_an_interrupted_run(copied):
    folder = copied("interrupted")
    entry = execute(check_recipe(load_recipe(folder / "recipe.yaml")), "rope", 0, folder, resume=True)
    assert entry.done
    assert (folder / "log.jsonl").read_bytes() == (SAVED / "interrupted" / "log.jsonl").read_bytes()


def test_finished_comparison_is_not_trained_again(copied, monkeypatch):
    monkeypatch.setattr("equitape.training.run.fit", lambda *_, **__: pytest.fail("trained again"))
    folder = copied("comparison")
    written = saved_json("comparison", "results.json")
    found = compare(check_recipe(load_recipe(folder / "recipe.yaml")), folder)
    assert [run.log for run in found.runs] == [run["log"] for run in written["runs"]]
    assert found.runs[0].evaluation.metrics == written["runs"][0]["evaluation"]["metrics"]


def test_evaluation_is_scored_again(copied):
    folder = copied("evaluation")
    written = json.loads((folder / "report.json").read_text())
    metrics = rescore(folder)["metrics"]
    for name in ("perplexity_16", "perplexity_32", "bits_per_byte_32"):
        assert metrics[name] == written["metrics"][name]
