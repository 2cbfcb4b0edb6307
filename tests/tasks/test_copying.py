"""Multiplication, copy, reverse and selective copy, taken apart again in plain Python."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import Oracle, tiny_model

from equitape.tasks import build_task
from equitape.tasks.digits import SYMBOLS


def rows_of(examples, task):
    """(prompt, answer) of every example, without the equals sign, the end token and padding."""
    for row, length, prompt in zip(
        examples.tokens.tolist(), examples.lengths.tolist(), examples.prompt_lengths.tolist(), strict=True
    ):
        assert row[length - 1] == task.eos_token_id
        assert set(row[length:]) <= {task.pad_token_id}
        assert task.eos_token_id not in row[: length - 1]
        yield row[: prompt - 1], row[prompt - 1], row[prompt : length - 1]


@given(st.integers(1, 15), st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_every_product_is_true(max_digits, seed):
    task = build_task("multiplication", {"trained_digits": max_digits, "tested_digits": max_digits})
    examples = task.draw(30, torch.Generator().manual_seed(seed))
    for prompt, equals, answer in rows_of(examples, task):
        assert SYMBOLS[equals] == "="
        number, _, digit = "".join(SYMBOLS[token] for token in prompt).partition("*")
        product = "".join(SYMBOLS[token] for token in answer)[::-1]
        assert 1 <= len(number) <= max_digits
        assert len(number) == 1 or number[-1] != "0"
        assert len(digit) == 1
        assert product == str(int(number[::-1]) * int(digit))


@pytest.mark.parametrize(("name", "step"), [("copy", 1), ("reverse", -1)])
def test_rows_are_copied_and_reversed(name, step):
    task = build_task(name, {"trained_symbols": 6, "tested_symbols": 9, "alphabet": 4})
    lengths = set()
    for prompt, equals, answer in rows_of(task.draw(300, torch.Generator().manual_seed(0)), task):
        assert equals == task.equals
        assert answer == prompt[::step]
        assert set(prompt) <= set(range(4))
        lengths.add(len(prompt))
    assert lengths == set(range(1, 7))


@given(st.integers(1, 9), st.integers(2, 9), st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_selective_copy_leaves_out_the_blanks(symbols, blanks, seed):
    options = {"symbols": symbols, "blanks": blanks, "dense_blanks": 1, "sparse_blanks": 12, "alphabet": 3}
    task = build_task("selective_copy", options)
    generator = torch.Generator().manual_seed(seed)
    for cell, examples in ((blanks, task.draw(10, generator)), (12, task.draw_cell((12,), 10, generator))):
        for prompt, equals, answer in rows_of(examples, task):
            assert equals == task.equals
            assert prompt.count(task.blank) == cell
            assert len(answer) == symbols
            assert answer == [token for token in prompt if token != task.blank]
            assert set(answer) <= set(range(3))


def test_blanks_lie_anywhere():
    task = build_task("selective_copy", {"symbols": 2, "blanks": 2, "dense_blanks": 1, "sparse_blanks": 3})
    rows = task.draw(6000, torch.Generator().manual_seed(0)).tokens[:, :4]
    _, counts = (rows == task.blank).long().unique(dim=0, return_counts=True)
    # each of the six arrangements in a sixth of the rows
    assert len(counts) == 6
    assert (counts / 6000 - 1 / 6).abs().max() < 0.02


def copy_of(task, forgets_after):
    """Writes the symbols of the row, and a zero for those after a number of them."""

    def follow(tokens):
        if task.equals not in tokens:
            return 0
        row, written = tokens[: tokens.index(task.equals)], len(tokens) - tokens.index(task.equals) - 1
        answer = [*(token for token in row if token != task.blank), task.eos_token_id]
        if written >= len(answer):
            return task.pad_token_id
        return answer[written] if written < forgets_after or answer[written] > task.blank else 0

    return follow


def test_selective_copy_is_scored_in_the_three_places():
    options = {"symbols": 3, "blanks": 4, "dense_blanks": 2, "sparse_blanks": 8, "samples": 50, "alphabet": 4}
    task = build_task("selective_copy", options)
    perfect = task.evaluate(Oracle(task, copy_of(task, 3)), 0)
    assert set(perfect.metrics.values()) == {100.0}
    assert perfect.curves[0].x == [2, 4, 8]
    forgetful = task.evaluate(Oracle(task, copy_of(task, 2)), 0).metrics
    for place in ("inside", "outside_dense", "outside_sparse"):
        # the third symbol is a zero in a quarter of the rows; the two before it and the end token are right in all
        share = forgetful[f"exact_match_{place}"]
        assert 5 < share < 50
        assert forgetful[f"token_accuracy_{place}"] == pytest.approx(75 + share / 4)


@pytest.mark.parametrize("name", ["copy", "reverse", "multiplication"])
def test_sizes_inside_and_outside_are_separated(name):
    unit = "digits" if name == "multiplication" else "symbols"
    task = build_task(name, {f"trained_{unit}": 2, f"tested_{unit}": 6, "samples": 4, "stride": 2})
    evaluation = task.evaluate(tiny_model(task), 0)
    assert evaluation.curves[0].x == [2, 4, 6]
    assert set(evaluation.metrics) == {"exact_match_inside", "exact_match_outside"}
    longest = task.draw_cell((6,), 200, torch.Generator().manual_seed(0))
    assert int(longest.lengths.max()) == task.tested_length
    assert int(longest.prompt_lengths.unique()) == task.prompt_length((6,))


def test_inside_is_the_mean_of_trained_sizes():
    task = build_task("copy", {"trained_symbols": 2, "tested_symbols": 6, "samples": 3, "alphabet": 4})

    def follow(tokens):
        row = tokens.index(task.equals) if task.equals in tokens else 99
        return copy_of(task, 99)(tokens) if row <= 3 else 0

    metrics = task.evaluate(Oracle(task, follow), 0).metrics
    assert metrics == pytest.approx({"exact_match_inside": 100.0, "exact_match_outside": 25.0})
