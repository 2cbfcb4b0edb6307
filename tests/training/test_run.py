"""What runs of a recipe write down, how their batches are padded, and how they are scored."""

from functools import partial

import pytest
import torch
from small_recipe import SMALL

from equitape.tasks.base import IGNORED, Evaluation, pad_right
from equitape.training.checked import check_recipe
from equitape.training.compare import collect
from equitape.training.fit import Collate
from equitape.training.recipe import parse_recipe
from equitape.training.run import PadTo, build_model, execute, score
from equitape.training.settings import TrainSettings
from equitape.training.trainer import ROW_TOKENS


def watched_recipe(**changes):
    """A checked recipe whose task notes what it is asked for, and how, instead of scoring: (recipe, notes)."""
    checked = check_recipe(parse_recipe({**SMALL, "name": "small", **changes}))
    notes = []

    def evaluate(model, seed, share=1.0):
        half = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        notes.append((seed, share, half, torch.is_grad_enabled(), model.training))
        return Evaluation(metrics={checked.task.headline: 1.0})

    checked.task.evaluate = evaluate
    return checked, notes


@pytest.mark.parametrize(("precision", "half"), [("bf16", torch.bfloat16), ("fp32", None)])
def test_scored_in_the_precision_and_to_the_share_asked_for(precision, half, tmp_path):
    checked, notes = watched_recipe(
        train={"steps": 4, "batch_size": 4, "eval_steps": 2, "precision": precision},
        evaluation={"share": 0.5, "share_while_training": 0.25},
        seeds=[3],
    )
    entry = execute(checked, "rope", 3, tmp_path)
    assert entry.evaluation.metrics == {checked.task.headline: 1.0}
    assert notes == [(3, budget, half, False, False) for budget in (0.25, 0.25, 0.5)]
    # and by itself
    notes.clear()
    score(torch.nn.Linear(1, 1).eval(), checked.task, 7, 0.1, TrainSettings(steps=1, precision=precision))
    assert notes == [(7, 0.1, half, False, False)]


def test_shares_that_are_left_out(tmp_path):
    checked, notes = watched_recipe(train={"steps": 2, "batch_size": 4, "eval_steps": 1})
    execute(checked, "rope", 0, tmp_path)
    assert [budget for _, budget, *_ in notes] == [0.05, 0.05, 1.0]


@pytest.mark.parametrize("compiled", [False, True])
def test_trained_tokens_are_those_of_the_examples(compiled, tmp_path, monkeypatch):
    """Also where every batch is padded to one length."""
    # what pads for the compiler is looked at, not the compiler
    monkeypatch.setattr("equitape.training.run.uses_compiler", lambda settings: compiled)
    checked, _ = watched_recipe(train={"steps": 3, "batch_size": 4})
    entry = execute(checked, "tape", 5, tmp_path)
    examples = checked.task.training_set(5)
    lengths = [len(examples[index]["input_ids"]) for index in range(3 * 4)]
    assert min(lengths) < checked.task.trained_length
    assert entry.trained_tokens == sum(lengths)


def test_a_value_made_narrower_by_its_encoding_is_not_shared():
    """All other weights start as those of every encoding."""
    narrow = {"kind": "tape", "label": "narrow", "carried_frequencies": 2}
    checked = check_recipe(parse_recipe({**SMALL, "encodings": ["rope", narrow]}))
    rope, tape = (build_model(config, 3).state_dict() for config in checked.configs.values())
    assert [name for name in rope if not torch.equal(rope[name], tape[name])] == [
        "model.layers.0.self_attn.v_proj.weight",
        "model.layers.0.self_attn.o_proj.weight",
    ]


@pytest.mark.parametrize("lengths", [(5, 5), (5, 3), (8, 5), (8, 8)])
def test_padding_to_one_length_is_masked(lengths):
    """Rows of one length come without a mask, and then have one for what is added to them."""
    examples = [{name: torch.arange(1, length + 1) for name in ("input_ids", "labels")} for length in lengths]
    pad_to = PadTo(partial(pad_right, pad_token_id=9), 8, 9)
    rows = [list(range(1, length + 1)) for length in lengths]
    batch = pad_to(examples)
    assert batch["input_ids"].tolist() == [row + [9] * (8 - len(row)) for row in rows]
    assert batch["labels"].tolist() == [row + [IGNORED] * (8 - len(row)) for row in rows]
    if lengths != (8, 8):
        assert batch["attention_mask"].tolist() == [[1] * len(row) + [0] * (8 - len(row)) for row in rows]
        assert Collate(pad_to)(list(enumerate(examples)))[ROW_TOKENS].tolist() == list(lengths)
    else:
        assert "attention_mask" not in batch


def test_results_name_the_task_and_the_source_of_claims(tmp_path):
    claims = {"tape": {"exact_match_grid": 41.42}}
    checked, _ = watched_recipe(claims=claims, claims_source="arXiv 2501.00712, figure 3")
    results = collect(checked, tmp_path).to_dict()
    # the longest sums: 9+9=81 and 99+99=891, with an end token
    assert results["task"] == {
        "name": "addition",
        "idea": "add two numbers, digits reversed; longer operands than in training",
        "headline": "exact_match_outside",
        "higher_is_better": True,
        "trained_length": 7,
        "tested_length": 10,
        "metrics": [{"name": "exact_match", "higher_is_better": True, "unit": "%"}],
        "warning": "",
    }
    assert (results["claims"], results["claims_source"]) == (claims, "arXiv 2501.00712, figure 3")
    nothing_claimed = collect(watched_recipe()[0], tmp_path).to_dict()
    assert (nothing_claimed["claims"], nothing_claimed["claims_source"]) == ({}, None)
