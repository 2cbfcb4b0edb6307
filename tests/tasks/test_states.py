"""State tracking: sequences followed step by step in plain Python, and scores of models with known mistakes."""

import math
from itertools import permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.modeling_outputs import CausalLMOutputWithPast

from equitape.tasks import build_task
from equitape.tasks.base import IGNORED
from equitape.tasks.flip_flop import IGNORE, ONE, PAD, READ, WRITE, ZERO, make_sequences


class Answerer:
    """A model whose most likely label at every place is what a function of the whole sequences [n, T] says: [n, T]."""

    device = torch.device("cpu")

    def __init__(self, task, answer):
        self.vocab_size = task.vocab_size
        self.answer = answer

    def __call__(self, input_ids, **_):
        return CausalLMOutputWithPast(logits=torch.nn.functional.one_hot(self.answer(input_ids), self.vocab_size))


# flip-flop


@given(st.integers(2, 40), st.sampled_from([0.0, 0.1, 0.8, 0.98]), st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_reads_repeat_the_last_write(pairs, ignore, seed):
    tokens, labels = make_sequences(8, 2 * pairs, ignore, torch.Generator().manual_seed(seed))
    for row, label in zip(tokens.tolist(), labels.tolist(), strict=True):
        assert (row[0], row[-2]) == (WRITE, READ)
        memory = None
        for place in range(0, 2 * pairs, 2):
            instruction, bit = row[place : place + 2]
            assert instruction in (WRITE, READ, IGNORE)
            assert bit in (ZERO, ONE)
            if instruction == WRITE:
                memory = bit
            if instruction == READ:
                assert bit == memory
            assert label[place : place + 2] == [IGNORED, bit if instruction == READ else IGNORED]


def test_instructions_have_the_configured_frequency():
    for ignore in (0.8, 0.98, 0.1):
        tokens, _ = make_sequences(400, 512, ignore, torch.Generator().manual_seed(0))
        instructions = tokens[:, 2:-2:2]
        for instruction, share in ((IGNORE, ignore), (WRITE, (1 - ignore) / 2), (READ, (1 - ignore) / 2)):
            assert abs(float((instructions == instruction).double().mean()) - share) < 0.01


def recall(reach):
    """Reads back a bit written at most `reach` pairs ago; says zero for older ones."""

    def answer(tokens):
        printed = torch.zeros_like(tokens)
        for row in range(len(tokens)):
            bit, written = ZERO, 0
            for place in range(0, tokens.shape[1], 2):
                if tokens[row, place] == WRITE:
                    bit, written = int(tokens[row, place + 1]), place
                printed[row, place] = bit if place - written <= 2 * reach else ZERO
        return printed

    return answer


def test_flip_flop_is_scored_on_reads_in_three_places():
    task = build_task("flip_flop", {"length": 64, "samples": 20})
    assert set(task.evaluate(Answerer(task, recall(64)), 0).metrics.values()) == {0.0}
    forgetful = task.evaluate(Answerer(task, recall(2)), 0)
    metrics = forgetful.metrics
    # half of the bits that are too old are ones
    assert metrics["error_outside_dense"] < metrics["error_inside"] < metrics["error_outside_sparse"] < 60
    (curve,) = forgetful.curves
    assert curve.x[0] == 1
    assert curve.y[0] == 0
    assert all(y > 0.2 for x, y in zip(curve.x, curve.y, strict=True) if x > 3)
    assert set(task.evaluate(Answerer(task, lambda tokens: 1 - recall(64)(tokens)), 0).metrics.values()) == {100.0}


def test_flip_flop_trains_on_reads_or_on_everything():
    reads = build_task("flip_flop", {"length": 32}).training_set(0)[3]
    everything = build_task("flip_flop", {"length": 32, "loss": "all"}).training_set(0)[3]
    assert torch.equal(reads["input_ids"], everything["input_ids"])
    assert torch.equal(everything["labels"], everything["input_ids"])
    counted = reads["labels"] != IGNORED
    assert torch.equal(reads["labels"][counted], reads["input_ids"][counted])
    assert (reads["input_ids"][:-1][counted[1:]] == READ).all()
    assert PAD not in reads["input_ids"]


# parity and groups


def test_parity_counts_ones():
    task = build_task("parity", {"trained_steps": 30, "tested_steps": 31})
    tokens, labels = task.draw(50, torch.Generator().manual_seed(0))
    assert tokens.shape == labels.shape == (50, task.trained_length)
    for row, label in zip(tokens.tolist(), labels.tolist(), strict=True):
        assert (row[0], row[-1]) == (task.bos_token_id, task.pad_token_id)
        bits = row[1:-1]
        assert label == [IGNORED, IGNORED] + [sum(bits[: step + 1]) % 2 for step in range(30)]


def even_by_cycles(permutation):
    """Independent of the count of inversions: the parity of points minus cycles."""
    seen, cycles = set(), 0
    for start in range(5):
        cycles += start not in seen
        while start not in seen:
            seen.add(start)
            start = permutation[start]
    return (5 - cycles) % 2 == 0


@pytest.mark.parametrize(
    ("name", "generators"), [("s5", "all"), ("s5", "transpositions"), ("a5", "all"), ("a5", "three_cycles")]
)
@pytest.mark.parametrize("steps", [1, 2, 7, 33])
def test_words_are_multiplied_out(name, generators, steps):
    task = build_task(name, {"trained_steps": steps, "tested_steps": steps + 1, "generators": generators})
    group = [p for p in permutations(range(5)) if name == "s5" or even_by_cycles(p)]
    tokens, labels = task.draw(40, torch.Generator().manual_seed(steps))
    for row, label in zip(tokens.tolist(), labels.tolist(), strict=True):
        assert (row[0], row[-1]) == (task.bos_token_id, task.pad_token_id)
        assert label[:2] == [IGNORED, IGNORED]
        product = tuple(range(5))
        for letter, state in zip(row[1:-1], label[2:], strict=True):
            step = group[letter]
            # first the new one, then all before it
            product = tuple(product[step[point]] for point in range(5))
            assert group[state] == product


def test_generators_are_what_they_are_called():
    counts = {}
    for name, generators in (("s5", "all"), ("s5", "transpositions"), ("a5", "all"), ("a5", "three_cycles")):
        task = build_task(name, {"generators": generators})
        counts[name, generators] = len(task.letters)
        drawn = task.draw(400, torch.Generator().manual_seed(0))[0][:, 1:-1]
        assert set(drawn.unique().tolist()) == set(task.letters.tolist())
    assert counts == {
        ("s5", "all"): math.factorial(5),
        ("s5", "transpositions"): math.comb(5, 2),
        ("a5", "all"): math.factorial(5) // 2,
        ("a5", "three_cycles"): 2 * math.comb(5, 3),
    }
    swap = build_task("s5", {"generators": "transpositions"})
    assert all(even_by_cycles(swap.elements[letter]) is False for letter in swap.letters)


def test_steps_inside_and_outside_are_separated():
    task = build_task("parity", {"trained_steps": 4, "tested_steps": 8, "samples": 500})

    def right_for(steps):
        def answer(tokens):
            states = (tokens[:, 1:-1].cumsum(1) % 2).clone()
            states[:, steps:] = 0
            return torch.nn.functional.pad(states, (1, 1))

        return answer

    perfect = task.evaluate(Answerer(task, right_for(8)), 0)
    assert set(perfect.metrics.values()) == {100.0}
    limited = task.evaluate(Answerer(task, right_for(4)), 0)
    assert limited.metrics["accuracy_inside"] == limited.metrics["exact_match_inside"] == 100.0
    # beyond its reach it says "even", which is right half of the time
    assert limited.metrics["accuracy_outside"] == pytest.approx(50, abs=5)
    assert limited.metrics["exact_match_outside"] == pytest.approx(100 / 16, abs=4)
    assert limited.curves[0].x == list(range(1, 9))
    assert limited.curves[0].y[:4] == [1.0] * 4
    assert max(limited.curves[0].y[4:]) < 0.6


def test_a_model_learns_from_these_labels():
    """The label of a step is judged against the output of that very step: otherwise copying a bit could not be learnt."""
    from oracles import tiny_model

    task = build_task("parity", {"trained_steps": 1, "tested_steps": 2, "samples": 20})
    torch.manual_seed(0)
    model, examples = tiny_model(task).train(), task.training_set(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(30):
        model(**task.collate([examples[16 * step + row] for row in range(16)])).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert task.evaluate(model.eval(), 0).metrics["accuracy_inside"] == 100.0
