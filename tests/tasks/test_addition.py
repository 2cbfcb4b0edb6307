"""Addition against Python's own arithmetic."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import Oracle, tiny_model

from equitape.tasks import build_task
from equitape.tasks.addition import (
    END,
    IGNORED,
    PAD,
    SYMBOLS,
    draw_lengths,
    make_sums,
)
from equitape.tasks.base import evaluation_generator
from equitape.tasks.digits import add


def text_of(tokens):
    return "".join(SYMBOLS[token] if token < len(SYMBOLS) else "$_"[token - END] for token in tokens)


def number(text):
    return int(text[::-1])


@given(st.integers(1, 12), st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_every_example_is_a_true_sum(max_digits, seed):
    generator = torch.Generator().manual_seed(seed)
    left, right = draw_lengths(20, max_digits, generator)
    assert left.max() <= max_digits
    sums = make_sums(left, right, generator)
    for row, tokens in enumerate(sums.tokens.tolist()):
        example, _, padding = text_of(tokens).partition("$")
        prompt, _, answer = example.partition("=")
        a, _, b = prompt.partition("+")
        assert (len(a), len(b)) == (left[row], right[row])
        assert (len(prompt) + 1, len(example) + 1) == (sums.prompt_lengths[row], sums.lengths[row])
        assert all(len(text) == 1 or text[-1] != "0" for text in (a, b))
        assert number(a) + number(b) == number(answer)
        assert answer == "0" or answer[-1] != "0"
        assert set(padding) <= {"_"}


@given(st.integers(0, 10**30), st.integers(0, 10**30))
@settings(max_examples=200, deadline=None)
def test_carries_run_as_far_as_they_must(left, right):
    # random digits seldom make the long chains of nines that a carry runs through
    for a, b in ((left, right), (left, 10**31 - 1 - left), (left, 10**31 - left)):
        digits = [torch.tensor([[int(d) for d in str(n).zfill(32)[::-1]]], dtype=torch.int16) for n in (a, b)]
        assert int("".join(str(d) for d in add(*digits)[0].tolist()[::-1])) == a + b


def test_only_the_answer_has_labels():
    sums = make_sums(torch.tensor([2, 1]), torch.tensor([3, 1]), torch.Generator().manual_seed(0))
    for row, (tokens, labels) in enumerate(zip(sums.tokens, sums.labels(), strict=True)):
        start = text_of(tokens.tolist()).index("=") + 1
        stop = text_of(tokens.tolist()).index("$") + 1
        assert (labels[:start] == IGNORED).all()
        assert torch.equal(labels[start:stop], tokens[start:stop])
        assert (labels[stop:] == IGNORED).all()
        assert sums.lengths[row] == stop


def test_lengths_are_drawn_evenly():
    left, right = draw_lengths(30_000, 3, torch.Generator().manual_seed(0))
    counts = torch.bincount(left * 4 + right, minlength=16).view(4, 4)[1:, 1:]
    assert (counts.float() / 30_000 - 1 / 9).abs().max() < 0.01


def mistake_of(prompt):
    """What the fallible oracle below does wrong: nothing, the first digit, the last one, or it never ends."""
    return number(prompt.partition("+")[0]) % 4


def follow(tokens):
    """Python's arithmetic, except for `mistake_of`."""
    prompt, equals, written = text_of(tokens).partition("=")
    if not equals:
        return 0
    a, _, b = prompt.partition("+")
    answer = str(number(a) + number(b))[::-1] + "$"
    place, mistake = len(written), mistake_of(prompt)
    if place >= len(answer):
        return 0
    wrong = (mistake == 1 and place == 0) or (mistake == 2 and place == len(answer) - 2)
    if mistake == 3 and place == len(answer) - 1:
        return 5
    right = END if answer[place] == "$" else int(answer[place])
    return (right + 1) % 10 if wrong else right


@pytest.mark.parametrize("method", ["generate", "teacher_forcing"])
def test_the_grid_counts_exactly_the_right_answers(method):
    options = {"trained_digits": 2, "tested_digits": 4, "samples": 20, "stride": 2, "method": method}
    task = build_task("addition", options)
    evaluation = task.evaluate(Oracle(task, follow), seed=3)
    (heat_map,) = evaluation.heat_maps
    assert heat_map.rows == heat_map.columns == [2, 4]

    # the same sums drawn again, one cell at a time, and judged by Python
    shares = {}
    for left in (2, 4):
        for right in (2, 4):
            rows = task.draw_cell((left, right), 20, evaluation_generator(3, left, right)).tokens.tolist()
            shares[left, right] = sum(mistake_of(text_of(row)) == 0 for row in rows) / 20
    assert heat_map.values == [[shares[left, right] for right in (2, 4)] for left in (2, 4)]
    assert 0 < sum(shares.values()) < 4
    outside = [shares[cell] for cell in shares if max(cell) > 2]
    assert evaluation.metrics == pytest.approx(
        {
            "exact_match_grid": 100 * sum(shares.values()) / 4,
            "exact_match_inside": 100 * shares[2, 2],
            "exact_match_outside": 100 * sum(outside) / 3,
        }
    )


def test_a_cell_is_the_same_in_every_grid():
    """Neither the stride, nor the other cells, nor the size of batches changes what a cell is asked."""
    model = Oracle(build_task("addition"), follow)
    base = {"trained_digits": 2, "tested_digits": 4, "samples": 8}
    full = build_task("addition", base).evaluate(model, 0).heat_maps[0].values
    sparse = build_task("addition", {**base, "stride": 2}).evaluate(model, 0).heat_maps[0].values
    narrow = build_task("addition", {**base, "batch_tokens": 30}).evaluate(model, 0).heat_maps[0].values
    assert full == narrow
    assert sparse == [row[1::2] for row in full[1::2]]


def test_perfect_inside_and_nothing_outside_is_a_quarter():
    def only_trained(tokens):
        prompt, equals, _ = text_of(tokens).partition("=")
        seen = equals and max(len(operand) for operand in prompt.split("+")) <= 2
        return perfect(tokens) if seen else 0

    def perfect(tokens):
        prompt, _, written = text_of(tokens).partition("=")
        a, _, b = prompt.partition("+")
        answer = [*(int(digit) for digit in str(number(a) + number(b))[::-1]), END]
        return answer[len(written)] if len(written) < len(answer) else PAD

    task = build_task("addition", {"trained_digits": 2, "tested_digits": 4, "samples": 2})
    metrics = task.evaluate(Oracle(task, only_trained), 0).metrics
    assert metrics == {"exact_match_grid": 25.0, "exact_match_inside": 100.0, "exact_match_outside": 0.0}


def test_a_smaller_share_takes_fewer_samples():
    task = build_task("addition", {"trained_digits": 1, "tested_digits": 2, "samples": 40})
    full, part = Oracle(task, follow), Oracle(task, follow)
    task.evaluate(full, 0)
    task.evaluate(part, 0, share=0.1)
    assert part.rows < 0.2 * full.rows
    with pytest.raises(ValueError, match="share is 0"):
        task.evaluate(part, 0, share=0)


def test_the_longest_sums_fill_the_announced_lengths():
    task = build_task("addition", {"trained_digits": 3, "tested_digits": 6})
    assert max(task.draw(2000, torch.Generator().manual_seed(0)).lengths) == task.trained_length
    nines = make_sums(torch.full((2000,), 6), torch.full((2000,), 6), torch.Generator().manual_seed(0))
    assert int(nines.lengths.max()) == task.tested_length


@pytest.mark.parametrize("kind", ["rope", "tape"])
def test_a_model_can_be_scored(kind):
    task = build_task("addition", {"trained_digits": 1, "tested_digits": 2, "samples": 3})
    metrics = task.evaluate(tiny_model(task, kind), 0).metrics
    assert all(0 <= value <= 100 for value in metrics.values())
