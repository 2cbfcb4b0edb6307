"""Fine-tuning on SCROLLS: examples taken apart again, a checkpoint gone on from, and a model that learns to answer."""

import json
import math
import sys
from dataclasses import replace

import pytest
import torch
from torch.utils.data import DataLoader, Subset

from cases import build, tiny_config
from equitape import EquitapeForCausalLM
from equitape.evaluation import load_evaluated_model
from equitape.tasks import build_task
from equitape.tasks.base import IGNORED
from equitape.training.checked import check_recipe
from equitape.training.recipe import parse_recipe
from equitape.training.run import execute

CHOICES = ["Entailment", "Contradiction", "Not mentioned"]


def rows(split, count=6, words=40):
    return [
        {
            "task": "contract_nli",
            "split": split,
            "doc_id": str(number),
            "document": f"{CHOICES[number % 3][0]}. " + "All parties agree. " * words,
            "items": [
                {
                    "id": f"{split}{number}",
                    "question": f"Clause {number} {CHOICES[number % 3]}.",
                    "choices": CHOICES,
                    "answers": [CHOICES[number % 3]],
                }
            ],
        }
        for number in range(count)
    ]


@pytest.fixture
def files(tmp_path):
    for split in ("train", "valid"):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(split)))
    return {"dataset": "contract_nli", "train": str(tmp_path / "train.jsonl"), "valid": str(tmp_path / "valid.jsonl")}


@pytest.fixture
def start(tmp_path):
    config = tiny_config("tape", vocab_size=258, num_hidden_layers=2, eos_token_id=256, pad_token_id=257)
    model = EquitapeForCausalLM(config)
    model.save_pretrained(tmp_path / "start")
    return str(tmp_path / "start")


def test_examples_taken_apart(files):
    task = build_task("scrolls", {**files, "length": 120})
    examples = task.training_set(3)
    seen = []
    for number in range(12):
        tokens, labels = examples[number]["input_ids"], examples[number]["labels"]
        assert len(tokens) == task.trained_length == 120
        answer = labels[labels != IGNORED]
        assert torch.equal(tokens[-len(answer) :], answer)
        assert answer[-1] == 256
        text, reply = bytes(tokens[: -len(answer)].tolist()).decode(), bytes(answer[:-1].tolist()).decode()
        document, _, question = text.partition("\n\n")
        which = question.removeprefix("Hypothesis: Clause ").split()[0]
        assert question == f"Hypothesis: Clause {which} {CHOICES[int(which) % 3]}.\nConclusion:"
        # the end is cut, so the document still begins with the letter of the answer
        assert document.startswith(f"{CHOICES[int(which) % 3][0]}. All")
        assert reply == f" {CHOICES[int(which) % 3]}"
        seen.append(which)
    # every question once an epoch, in another order
    assert sorted(seen[:6]) == sorted(seen[6:]) == list("012345")
    assert seen[:6] != seen[6:]


def test_examples_depend_on_seed_and_number_alone(files):
    task = build_task("scrolls", {**files, "length": 120})
    examples, again, other = task.training_set(1), task.training_set(1), task.training_set(2)
    ordered = [examples[number]["input_ids"] for number in range(18)]
    for number in (17, 0, 9):
        assert torch.equal(again[number]["input_ids"], ordered[number])
    assert not all(torch.equal(other[number]["input_ids"], ordered[number]) for number in range(18))
    loaded = DataLoader(Subset(examples, range(18)), batch_size=3, collate_fn=task.collate, num_workers=2)
    assert torch.equal(torch.cat([batch["input_ids"] for batch in loaded]), torch.stack(ordered))


@pytest.mark.parametrize("rule", ["end", "middle", "start"])
def test_what_is_cut_is_the_document(rule, files):
    examples = build_task("scrolls", {**files, "length": 120, "cut": rule}).training_set(0)
    assert examples.summary.startswith(f"6 questions with an answer; 6 lose the {rule} of their documents, 0 the end")
    example = examples[0]
    text = bytes(example["input_ids"][example["labels"] == IGNORED].tolist()).decode()
    assert text.endswith("Conclusion:")
    assert text[1:7] == ". All " if rule != "start" else not text.startswith(("E.", "C.", "N."))
    whole = build_task("scrolls", {**files, "length": 2000}).training_set(0)[0]
    assert len(whole["input_ids"]) < 2000


def test_a_model_learns_to_answer_from_a_checkpoint(files, start, tmp_path):
    """Nothing is right before; after a few steps everything is, and what was saved can be evaluated as it is."""
    for split in ("train", "valid"):
        short = "".join(json.dumps(row) + "\n" for row in rows(split, words=1))
        (tmp_path / f"{split}.jsonl").write_text(short)
    recipe = parse_recipe(
        {
            "name": "small",
            "task": {"name": "scrolls", **files, "length": 96, "samples": 6},
            "encodings": [{"start": start, "label": "tape"}],
            "train": {"steps": 200, "batch_size": 6, "learning_rate": 5e-3, "warmup_ratio": 0.1, "precision": "fp32"},
        }
    )
    checked = check_recipe(recipe)
    config = checked.configs["tape"]
    assert config.encoding["kind"] == "tape"
    # that is more than the checkpoint announced
    assert config.max_position_embeddings == config.context == 96
    model = EquitapeForCausalLM.from_pretrained(start).eval()
    before = checked.task.evaluate(model, 0).metrics
    entry = execute(checked, "tape", 0, tmp_path / "run")
    after = entry.evaluation.metrics
    assert before["answer_loss"] > 3
    assert after["answer_loss"] < 0.1
    assert after["score"] == 100
    assert after["documents_cut"] == 0
    assert before["score"] == 0
    who = load_evaluated_model(str(tmp_path / "run"), device="cpu")
    assert who.context == 96
    assert len(who.tokenizer) == 258
    # it did start there: one step of no size leaves the weights as they were
    still = replace(recipe, train=replace(recipe.train, steps=1, learning_rate=0.0))
    execute(check_recipe(still), "tape", 0, tmp_path / "still")
    kept = EquitapeForCausalLM.from_pretrained(tmp_path / "still/model").state_dict()
    assert all(torch.equal(kept[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(("samples", "share"), [(100, 25.0), (2, 50.0), (4, 25.0)])
def test_cut_documents_are_a_share_of_those_asked_about(samples, share, files, tmp_path):
    """One of four questions has a long document; with two samples, one of two."""
    asked = [*rows("valid", 1, words=40), *rows("valid", 4, words=1)[1:]]
    (tmp_path / "valid.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    task = build_task("scrolls", {**files, "length": 120, "samples": samples})
    model = build("rope", dtype=torch.float32, vocab_size=258, max_position_embeddings=128)
    assert task.evaluate(model, 0).metrics["documents_cut"] == share


def test_scores_without_rouge(tmp_path, monkeypatch, caplog):
    row = rows("train")[0] | {"task": "qmsum"}
    for split in ("train", "valid"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps({**row, "split": split}) + "\n")
    task = build_task(
        "scrolls",
        {
            "dataset": "qmsum",
            "train": str(tmp_path / "train.jsonl"),
            "valid": str(tmp_path / "valid.jsonl"),
            "length": 256,
        },
    )
    model = build("rope", dtype=torch.float32, vocab_size=258, max_position_embeddings=256)
    monkeypatch.setitem(sys.modules, "rouge_score", None)
    found = task.evaluate(model, 0).metrics
    assert math.isnan(found["score"])
    assert found["answer_loss"] > 0
    assert "not scored" in caplog.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dataset": "contract"}, r"no set 'contract'. Did you mean 'contract_nli'"),
        ({"dataset": ""}, "no set ''"),
        ({"length": 30}, "a length of 30 has no room for a document"),
        ({"length": 0}, "length is 0"),
        ({"cut": "ending"}, r"cut is 'ending'"),
        ({"train": "nowhere.jsonl"}, "There is no file or folder"),
        ({"tokenizer": "nowhere"}, "There is no tokenizer"),
    ],
)
def test_wrong_options(changes, message, files):
    with pytest.raises(ValueError, match=message):
        build_task("scrolls", {**files, **changes})


def test_checkpoints_that_cannot_be_gone_on_from(files, start, tmp_path):
    task = {"name": "scrolls", **files, "length": 120}

    def checked(encodings, **more):
        return check_recipe(parse_recipe({"task": task, "encodings": encodings, "train": {"steps": 1}, **more}))

    with pytest.raises(ValueError, match="There is no checkpoint to start from at 'nowhere'"):
        checked([{"start": "nowhere"}])
    with pytest.raises(ValueError, match=r"starts from a checkpoint, which has its own encoding; remove mixer_size"):
        checked([{"start": start, "mixer_size": 3}])
    with pytest.raises(ValueError, match="model sets sizes, but every encoding starts from a checkpoint"):
        checked([{"start": start}], model={"hidden_size": 64})
    with pytest.raises(ValueError, match="is neither a kind nor a dictionary such as"):
        checked([{"label": "x"}])
    other = build("rope", dtype=torch.float32, vocab_size=100)
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="The tokenizer has 258 entries, but the model has only 100"):
        checked([{"start": str(tmp_path / "other")}])
    with pytest.raises(ValueError, match=r"has 258 tokens and task 'addition' has"):
        check_recipe(
            parse_recipe({"task": {"name": "addition"}, "encodings": [{"start": start}], "train": {"steps": 1}})
        )
    # mixed with new models, and named by its folder
    mixed = checked([{"start": start}, "rope"])
    assert list(mixed.configs) == ["start", "rope"]
