"""What holds for every task that makes its own examples, and what all of them refuse."""

import json
import math
import pickle
from pathlib import Path

import pytest
import torch
from oracles import tiny_model
from torch.utils.data import DataLoader

from command_line import call
from equitape.tasks import TASKS, Evaluation, available_evaluations, available_tasks, build_task
from equitape.tasks.base import IGNORED, evaluation_generator, pad_right

DOCS = Path(__file__).parents[2] / "docs/reference/tasks"

SMALL = {
    "addition": {"trained_digits": 3, "tested_digits": 5, "samples": 2},
    "multiplication": {"trained_digits": 3, "tested_digits": 5, "samples": 2},
    "copy": {"trained_symbols": 3, "tested_symbols": 5, "samples": 2},
    "reverse": {"trained_symbols": 3, "tested_symbols": 5, "samples": 2},
    "selective_copy": {"symbols": 4, "blanks": 3, "dense_blanks": 2, "sparse_blanks": 6, "samples": 2},
    "flip_flop": {"length": 16, "samples": 4},
    "retrieval": {"length": 16, "needles": 3, "queries": 2, "samples": 40, "factors": [1, 2], "depths": 2},
    "parity": {"trained_steps": 5, "tested_steps": 9, "samples": 4},
    "s5": {"trained_steps": 5, "tested_steps": 9, "samples": 4},
    "a5": {"trained_steps": 5, "tested_steps": 9, "samples": 4},
}


@pytest.fixture(params=SMALL)
def task(request):
    return build_task(request.param, SMALL[request.param])


def test_all_are_listed():
    assert set(SMALL) <= set(available_tasks())
    for name in SMALL:
        assert TASKS[name].name == name
        assert TASKS[name].idea


def same(left, right):
    return set(left) == set(right) and all(torch.equal(left[name], right[name]) for name in left)


def test_an_example_depends_on_seed_and_number_alone(task):
    examples = task.training_set(7)
    ordered = [examples[index] for index in range(600)]
    for index in (599, 0, 300, 255, 256):
        assert same(examples[index], ordered[index])
    # another block, another seed
    assert not all(same(ordered[index], ordered[index + 256]) for index in range(50))
    others = task.training_set(8)
    assert not all(same(others[index], ordered[index]) for index in range(50))
    assert len({example["input_ids"].numpy().tobytes() for example in ordered}) > 20


def test_workers_change_nothing(task):
    examples = pickle.loads(pickle.dumps(task)).training_set(7)
    subset = torch.utils.data.Subset(examples, range(600))
    alone, several = (
        list(DataLoader(subset, batch_size=100, collate_fn=task.collate, num_workers=workers)) for workers in (0, 2)
    )
    assert all(same(a, b) for a, b in zip(alone, several, strict=True))


def test_examples_fit_what_the_task_announces(task):
    drawn = task.training_set(0)
    examples = [drawn[index] for index in range(300)]
    lengths = [len(example["input_ids"]) for example in examples]
    assert max(lengths) <= task.trained_length <= task.tested_length
    assert max(lengths) >= task.trained_length - 1
    for example in examples:
        tokens, labels = example["input_ids"], example["labels"]
        assert tokens.dtype == labels.dtype == torch.long
        assert tokens.shape == labels.shape
        assert 0 <= tokens.min() <= tokens.max() < task.vocab_size
        counted = labels[labels != IGNORED]
        assert len(counted)
        assert 0 <= counted.min() <= counted.max() < task.vocab_size
        # the first token is predicted from nothing
        assert labels[0] == IGNORED


def test_batches_train_a_model(task):
    model = tiny_model(task, "tape").train()
    examples = task.training_set(0)
    loss = model(**task.collate([examples[index] for index in range(6)])).loss
    loss.backward()
    assert math.isfinite(loss.item())
    assert any(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in model.parameters())


def test_evaluation_is_repeatable_and_well_formed(task):
    model = tiny_model(task)
    first, again = task.evaluate(model, 0), task.evaluate(model, 0)
    assert isinstance(first, Evaluation)
    assert first == again
    assert task.headline in first.metrics
    assert all(0 <= value <= 100 for value in first.metrics.values())
    assert any("outside" in name for name in first.metrics)
    assert any("inside" in name for name in first.metrics)
    assert json.loads(json.dumps(first.metrics)) == first.metrics
    assert set(task.evaluate(model, 0, share=0.5).metrics) == set(first.metrics)


def test_padding_goes_to_the_right():
    short = {"input_ids": torch.tensor([1, 2]), "labels": torch.tensor([IGNORED, 2])}
    long = {"input_ids": torch.tensor([3, 4, 5]), "labels": torch.tensor([IGNORED, 4, 5])}
    batch = pad_right([short, long], 9)
    assert batch["input_ids"].tolist() == [[1, 2, 9], [3, 4, 5]]
    assert batch["labels"].tolist() == [[IGNORED, 2, IGNORED], [IGNORED, 4, 5]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert "attention_mask" not in pad_right([short, short], 9)


def test_parts_of_an_evaluation_draw_their_own_numbers():
    def drawn(*place):
        return tuple(torch.randint(0, 10**6, (3,), generator=evaluation_generator(*place)).tolist())

    assert drawn(0, 1, 2) == drawn(0, 1, 2)
    assert len({drawn(0, 1, 2), drawn(0, 2, 1), drawn(0, 12), drawn(1, 1, 2), drawn(0)}) == 5


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("additions", {}, "Did you mean 'addition'"),
        ("passkey", {}, "equitape eval MODEL --task passkey"),
        ("addition", {"trained_digit": 3}, "Did you mean 'trained_digits'"),
        ("addition", {"trained_digits": 0}, "trained_digits is 0"),
        ("addition", {"trained_digits": 8, "tested_digits": 4}, "tested_digits is 4, less than trained_digits, 8"),
        ("addition", {"trained_digits": 2, "stride": 3}, "skip all trained sizes"),
        ("addition", {"samples": 0}, "samples is 0"),
        ("addition", {"method": "beam"}, "method is 'beam'; it must be one of 'generate', 'teacher_forcing'"),
        ("addition", {"stride": "2"}, "it must be a whole number"),
        ("multiplication", {"tested_digits": 1}, "less than trained_digits"),
        ("copy", {"alphabet": 0}, "alphabet is 0"),
        ("reverse", {"tested_symbols": 1}, "less than trained_symbols"),
        ("selective_copy", {"dense_blanks": 300}, "must grow in this order"),
        ("selective_copy", {"symbols": 0}, "symbols is 0"),
        ("flip_flop", {"length": 7}, "must be even"),
        ("flip_flop", {"ignore": 1.2}, "from 0 to 1"),
        ("flip_flop", {"ignore": 0.99}, "must grow in this order"),
        ("flip_flop", {"loss": "read"}, "Did you mean 'reads'"),
        ("retrieval", {"queries": 9}, "at most needles, 8"),
        ("retrieval", {"needles": 65}, "at most keys, 64"),
        ("retrieval", {"length": 24}, "at least 25"),
        ("retrieval", {"factors": [2, 4]}, "must start at 1"),
        ("retrieval", {"factors": [1]}, "must start at 1"),
        ("parity", {"tested_steps": 40}, "must go beyond training"),
        ("parity", {"batch_tokens": 0}, "batch_tokens is 0"),
        ("s5", {"generators": "three_cycles"}, "Allowed: all, transpositions"),
        ("a5", {"generators": "transpositions"}, "Allowed: all, three_cycles"),
    ],
)
def test_wrong_options_are_refused_in_one_sentence(name, options, message):
    with pytest.raises(ValueError, match=message) as caught:
        build_task(name, options)
    assert "\n" not in str(caught.value)


def test_every_task_and_option_is_documented():
    index = (DOCS / "README.md").read_text()
    for name in available_tasks():
        page = (DOCS / f"{name}.md").read_text()
        assert f"({name}.md)" in index
        for option in TASKS[name].options_class.__dataclass_fields__:
            assert f"`{option}`" in page, f"{name}.md says nothing of {option}"


def test_the_list_of_tasks():
    table = call("tasks")
    assert all(name in table.output for name in SMALL)
    listed = json.loads(call("tasks", "--json").output)
    assert set(listed) == {*available_tasks(), *available_evaluations()}
    can = {name: row["can"] for name, row in listed.items()}
    assert (can["addition"], can["passkey"], can["scrolls"]) == ("train", "evaluate", "both")
    assert listed["scrolls"]["options"] != listed["scrolls"]["evaluation"]["options"]
    assert listed["addition"]["options"]["tested_digits"] == 40
    assert listed["flip_flop"]["higher_is_better"] is False
