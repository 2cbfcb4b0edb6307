"""Retrieval: rows taken apart in plain Python, and scores of models with known reach."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.modeling_outputs import CausalLMOutputWithPast

from equitape.tasks import build_task
from equitape.tasks.base import IGNORED


def kinds(row):
    return "".join("n" if token < 64 else "k" if token < 128 else "v" if token < 192 else "|" for token in row)


def take_apart(row, label):
    """Check one row against its labels; its context, {key: place} of its needles, and the keys asked for."""
    mark = kinds(row).index("|")
    context, asked = row[:mark], row[mark + 1 :]
    found = {token: place for place, token in enumerate(context) if 64 <= token < 128}
    assert len(found) == kinds(context).count("kv") == kinds(context).count("v")
    assert kinds(asked) == "kv" * (len(asked) // 2)
    for key, value in zip(asked[::2], asked[1::2], strict=True):
        assert context[found[key] + 1] == value
    assert label == [IGNORED] * (mark + 1) + [t for value in asked[1::2] for t in (IGNORED, value)]
    return context, found, asked[::2]


sizes = given(st.integers(1, 8), st.integers(1, 8), st.integers(0, 20), st.integers(0, 1000))


def build(needles, queries, noise):
    queries = min(needles, queries)
    length = 2 * needles + noise + 1 + 2 * queries
    return build_task("retrieval", {"length": length, "needles": needles, "queries": queries})


@sizes
@settings(max_examples=40, deadline=None)
def test_scored_rows_hide_all_needles(needles, queries, noise, seed):
    task = build(needles, queries, noise)
    length = task.trained_length
    tokens, labels, depth = task.draw_test(8, length, torch.Generator().manual_seed(seed))
    assert tokens.shape == labels.shape == (8, length)
    for row, label, deep in zip(tokens.tolist(), labels.tolist(), depth.tolist(), strict=True):
        context, found, asked = take_apart(row, label)
        assert len(found) == needles
        assert len(asked) == len(set(asked)) == task.options.queries
        assert deep == pytest.approx([found[key] / max(1, len(context) - 2) for key in asked])


@sizes
@settings(max_examples=40, deadline=None)
def test_training_rows_hide_some_needles_and_ask_often(needles, queries, noise, seed):
    task = build(needles, queries, noise)
    tokens, labels = task.draw(16, torch.Generator().manual_seed(seed))
    assert tokens.shape == labels.shape == (16, task.trained_length)
    for row, label in zip(tokens.tolist(), labels.tolist(), strict=True):
        _, found, asked = take_apart(row, label)
        assert 1 <= len(found) <= needles
        assert len(asked) >= task.options.queries


class Finder:
    """Answers a query when its needle is at most `reach` tokens before the mark; else with the mark itself."""

    device = torch.device("cpu")

    def __init__(self, task, reach):
        self.task, self.reach = task, reach

    def __call__(self, input_ids, **_):
        printed = torch.full_like(input_ids, self.task.mark)
        for row, out in zip(input_ids.tolist(), printed, strict=True):
            mark = row.index(self.task.mark)
            for place in range(mark + 1, len(row), 2):
                first = row.index(row[place])
                if mark - first <= self.reach:
                    out[place] = row[first + 1]
        return CausalLMOutputWithPast(logits=torch.nn.functional.one_hot(printed, self.task.vocab_size))


def test_scores_by_length_and_depth():
    task = build_task("retrieval", {"length": 64, "samples": 200, "factors": [1, 2, 4]})
    perfect = task.evaluate(Finder(task, 10**6), 0)
    assert set(perfect.metrics) == {f"exact_match_{n}" for n in ("inside", "outside", "outside_2x", "outside_4x")}
    assert set(perfect.metrics.values()) == {100.0}
    near = task.evaluate(Finder(task, 64), 0)
    assert near.metrics["exact_match_inside"] == 100.0
    assert near.metrics["exact_match_outside_2x"] == pytest.approx(100 * 64 / 119, abs=5)
    assert near.metrics["exact_match_outside_4x"] == pytest.approx(100 * 64 / 247, abs=5)
    mean = (near.metrics["exact_match_outside_2x"] + near.metrics["exact_match_outside_4x"]) / 2
    assert near.metrics["exact_match_outside"] == pytest.approx(mean)
    (heat_map,) = near.heat_maps
    assert heat_map.rows == [64, 128, 256]
    assert heat_map.columns == [5, 15, 25, 35, 45, 55, 65, 75, 85, 95]
    assert heat_map.values[0] == [1.0] * 10
    assert heat_map.values[2][:7] == [0.0] * 7
    assert heat_map.values[2][8:] == [1.0] * 2
    assert near.curves[0].y == [near.metrics[name] / 100 for name in near.metrics if name != "exact_match_outside"]


def test_every_place_is_equally_likely():
    task = build_task("retrieval", {"length": 29, "needles": 4, "queries": 4})
    tokens, _, depth = task.draw_test(4000, 29, torch.Generator().manual_seed(0))
    assert depth.min() == 0
    assert depth.max() == 1
    is_key = (tokens[:, :20] >= 64) & (tokens[:, :20] < 128)
    # pairs at the ends have neighbours on one side only, so these places are a little more frequent
    frequency = is_key[:, 1:18].double().mean(0)
    assert (frequency - frequency.mean()).abs().max() < 0.03


def test_training_covers_numbers_of_needles_and_places_of_the_mark():
    task = build_task("retrieval", {"length": 40, "needles": 4, "queries": 2})
    tokens, labels = task.draw(4000, torch.Generator().manual_seed(0))
    marks, counts = [], torch.zeros(5)
    for row, label in zip(tokens.tolist(), labels.tolist(), strict=True):
        context, found, _ = take_apart(row, label)
        marks.append(len(context))
        counts[len(found)] += 1
    assert (counts[1:] / 4000 - 0.25).abs().max() < 0.03
    # as long as in a scored row, and as short as one needle
    assert (max(marks), min(marks)) == (35, 3)


@pytest.mark.parametrize("factors", [[0, 1], [-1, 1], [0, 1, 2]])
def test_rows_without_tokens_are_refused_before_training(factors):
    with pytest.raises(ValueError, match="factors"):
        build_task("retrieval", {"factors": factors})
