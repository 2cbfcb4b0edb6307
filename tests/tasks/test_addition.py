"""Addition examples against Python's own arithmetic."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import tiny_config
from equitape import EquitapeForCausalLM
from equitape.tasks.addition import (
    END,
    IGNORED,
    PAD,
    SYMBOLS,
    VOCAB_SIZE,
    decode,
    draw_lengths,
    encode,
    exact_match,
    make_sums,
)


def text_of(tokens):
    return "".join(SYMBOLS[token] if token < len(SYMBOLS) else "$_"[token - END] for token in tokens.tolist())


@given(st.integers(1, 12), st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_every_example_is_a_true_sum(max_digits, seed):
    generator = torch.Generator().manual_seed(seed)
    left, right = draw_lengths(20, max_digits, generator)
    assert left.max() <= max_digits
    sums = make_sums(left, right, generator)
    for row, tokens in enumerate(sums.tokens):
        example, _, padding = text_of(tokens).partition("$")
        prompt, _, answer = example.partition("=")
        a, _, b = prompt.partition("+")
        assert (len(a), len(b)) == (left[row], right[row])
        assert all(len(number) == 1 or number[-1] != "0" for number in (a, b))
        assert int(a[::-1]) + int(b[::-1]) == int(answer[::-1])
        assert answer == "0" or answer[-1] != "0"
        assert set(padding) <= {"_"}


def test_only_the_answer_has_labels():
    sums = make_sums(torch.tensor([2, 1]), torch.tensor([3, 1]), torch.Generator().manual_seed(0))
    inputs = sums.training_inputs()
    for row in range(2):
        tokens, labels, mask = (inputs[name][row] for name in ("input_ids", "labels", "attention_mask"))
        start = text_of(tokens).index("=") + 1
        stop = text_of(tokens).index("$") + 1
        assert (labels[:start] == IGNORED).all()
        assert torch.equal(labels[start:stop], tokens[start:stop])
        assert (labels[stop:] == IGNORED).all()
        assert mask.tolist() == [1] * stop + [0] * (len(tokens) - stop)


def test_lengths_are_drawn_evenly():
    left, right = draw_lengths(30_000, 3, torch.Generator().manual_seed(0))
    counts = torch.bincount(left * 4 + right, minlength=16).view(4, 4)[1:, 1:]
    assert (counts.float() / 30_000 - 1 / 9).abs().max() < 0.01


def test_encode_and_decode():
    assert text_of(encode(120, 7)[0]) == "021+7="
    assert decode(torch.tensor([7, 2, 1, END, PAD])) == "127"
    assert decode(torch.tensor([SYMBOLS.index("+"), END])) == "?"
    assert decode(torch.tensor([END])) == "?"


class Oracle:
    """Answers every prompt by Python's arithmetic, except those whose left operand is even when told to fail."""

    device = torch.device("cpu")

    def __init__(self, fails=False):
        self.fails = fails

    def generate(self, prompts, max_new_tokens, **_):
        rows = []
        for prompt in prompts:
            a, _, b = text_of(prompt).rstrip("=").partition("+")
            total = int(a[::-1]) + int(b[::-1]) + (self.fails and int(a[0]) % 2 == 0)
            answer = [int(digit) for digit in str(total)[::-1]] + [END]
            rows.append((answer + [PAD] * max_new_tokens)[:max_new_tokens])
        return torch.cat((prompts, torch.tensor(rows)), dim=1)


def test_exact_match_counts_whole_answers():
    generator = torch.Generator().manual_seed(0)
    assert exact_match(Oracle(), 3, 5, 50, generator) == 1.0
    assert 0.3 < exact_match(Oracle(fails=True), 3, 5, 200, generator) < 0.7


@pytest.mark.parametrize("kind", ["rope", "tape"])
def test_a_model_can_be_scored(kind):
    model = EquitapeForCausalLM(tiny_config(kind, vocab_size=VOCAB_SIZE, pad_token_id=PAD)).eval()
    assert 0.0 <= exact_match(model, 2, 1, 8, torch.Generator().manual_seed(0)) <= 1.0
