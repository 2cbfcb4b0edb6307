"""Scoring by greedy decoding: together and cell by cell, with and without stopping, decoded and forced."""

import pytest
import torch
from oracles import Oracle, tiny_model, trained_copier
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, StaticCache

from equitape.tasks import build_task
from equitape.tasks.answers import forced_accuracy, forced_tokens, greedy_answers, score_answers
from equitape.tasks.base import evaluation_generator


def cell_by_cell(task, model, seed):
    """Every size by itself, decoded to the end with nothing but transformers' own stopping."""
    shares = []
    for size in range(1, task.options.tested_symbols + 1):
        tokens = task.draw_cell((size,), task.options.samples, evaluation_generator(seed, size)).tokens
        prompts, answers = tokens[:, : size + 1], tokens[:, size + 1 :]
        output = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=answers.shape[1],
            do_sample=False,
            eos_token_id=task.eos_token_id,
            pad_token_id=task.pad_token_id,
        )[:, size + 1 :]
        right = [row.tolist() == answer.tolist() for row, answer in zip(output, answers, strict=True)]
        shares.append(sum(right) / len(right))
    return shares


def score(model, task, prompts, answers, method, batch_tokens):
    return score_answers(
        model, prompts, answers, end=task.eos_token_id, pad=task.pad_token_id, method=method, batch_tokens=batch_tokens
    )


@pytest.mark.parametrize("kind", ["rope", "fire", "tape"])
def test_a_trained_model_scores_the_same_every_way(kind):
    """All sizes in one padded batch, in small ones, by forcing: as size by size without padding or early stops."""
    task, model = trained_copier(kind)
    assert len(list(task.group_cells([(size,) for size in range(1, 6)], task.options.samples))) == 1
    expected = cell_by_cell(task, model, seed=5)
    # neither all right nor all wrong, or the comparison would say nothing
    assert 0.1 < sum(expected) / len(expected) < 0.9
    assert task.evaluate(model, 5).curves[0].y == expected
    for changes in ({"method": "teacher_forcing"}, {"batch_tokens": 40}):
        other = build_task("copy", {**task.options.to_dict(), **changes})
        assert other.evaluate(model, 5).curves[0].y == expected


def test_right_answers_of_many_lengths_are_found_in_one_batch():
    """Rows come back in their own order, though batches are sorted by the length of the answer."""
    task = build_task("copy", {"alphabet": 5})
    answers = torch.full((6, 5), task.pad_token_id)
    for row, length in enumerate((4, 1, 3, 1, 2, 4)):
        answers[row, :length] = torch.arange(length)
        answers[row, length] = task.eos_token_id
    # prompts of three and of two tokens, padded on the left
    prompts = torch.tensor([[row % 5, length, task.equals] for row, length in enumerate((4, 1, 3, 1, 2, 4))])
    prompts[3:5, 0] = task.pad_token_id

    def follow(tokens):
        if task.equals not in tokens:
            return 0
        before = tokens.index(task.equals)
        written = len(tokens) - before - 1
        if before == 2 and tokens[0] == 2:
            return 4
        return written if written < tokens[before - 1] else task.eos_token_id

    for method in ("generate", "teacher_forcing"):
        for batch_tokens in (8, 20, 1000):
            right = score(Oracle(task, follow), task, prompts, answers, method, batch_tokens)
            assert right.tolist() == [True, True, False, True, True, True]


def test_decoding_stops_when_nothing_can_be_right_any_more():
    task = build_task("copy", {"alphabet": 3})
    model = Oracle(task, lambda tokens: 1 if len(tokens) < 12 else 2)
    prompts = torch.tensor([[1] * 9 + [task.equals]] * 2)
    answers = torch.tensor([[1] * 9 + [task.eos_token_id]] * 2)
    wrong = score(model, task, prompts, answers, "generate", 10**6)
    assert not wrong.any()
    # two right tokens, then one wrong
    assert model.steps == 3


def test_answers_that_end_early_or_go_on_are_wrong():
    task = build_task("copy", {"alphabet": 3})
    prompts = torch.tensor([[1, 1, task.equals]])
    answers = torch.tensor([[1, 1, task.eos_token_id]])
    for follow, expected in (
        (lambda tokens: task.eos_token_id if len(tokens) == 4 else 1, False),
        (lambda tokens: 1, False),
        (lambda tokens: 1 if len(tokens) < 5 else task.eos_token_id, True),
    ):
        for method in ("generate", "teacher_forcing"):
            right = score(Oracle(task, follow), task, prompts, answers, method, 100)
            assert right.tolist() == [expected]


def test_answers_are_padded_after_the_end_mark():
    task = build_task("copy", {"alphabet": 3})
    model = Oracle(task, lambda tokens: task.eos_token_id if len(tokens) > 3 else 2)
    written = greedy_answers(model, torch.tensor([[0, 1, 0]]), 6, end=task.eos_token_id, pad=task.pad_token_id)
    assert written.tolist() == [[2, task.eos_token_id] + [task.pad_token_id] * 4]


DYNAMIC = {"kind": "dynamic", "factor": 2.0, "original_max_positions": 16}


def small_llama(task):
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=task.vocab_size, **sizes)).eval()


@pytest.mark.parametrize(
    ("make", "is_fixed"),
    [
        (lambda task: tiny_model(task, {"kind": "tape", "init_scale": 0.5}), True),
        # cannot be continued from a cache
        (lambda task: tiny_model(task, {"kind": "rope", "scaling": DYNAMIC}), False),
        # its cache is bounded, and xPos could not count in one of fixed length
        (lambda task: tiny_model(task, "xpos", sliding_window=8), False),
        # not of ours
        (small_llama, False),
    ],
)
def test_a_cache_has_its_whole_length_from_the_start(make, is_fixed, monkeypatch):
    task = build_task("copy", {"alphabet": 3})
    model = make(task)
    # says nothing of caches
    model.generation_config = GenerationConfig()
    prompts = torch.tensor([[task.pad_token_id, 1, task.equals], [0, 2, task.equals]])
    mask = (prompts != task.pad_token_id).long()
    # no token ends them
    settings = {"max_new_tokens": 70, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0, "use_cache": False}
    expected = model.generate(prompts, attention_mask=mask, **settings)
    caches, forward = [], model.forward

    def spy(*args, past_key_values=None, **kwargs):
        caches.append(past_key_values)
        return forward(*args, past_key_values=past_key_values, **kwargs)

    monkeypatch.setattr(model, "forward", spy)
    written = greedy_answers(model, prompts, 70, end=-1, pad=task.pad_token_id)
    assert torch.equal(written, expected[:, 3:])
    assert len(caches) == 70
    assert all(isinstance(cache, StaticCache) for cache in caches) == is_fixed
    if is_fixed:
        # 73 tokens, rounded up
        assert {cache.layers[0].keys.shape[2] for cache in caches} == {128}


@pytest.mark.parametrize("kind", ["rope", "fire", "tape"])
def test_answers_in_half_precision(kind):
    """Keys, values and what TAPE carries with them go into one cache under autocast, as on a GPU."""
    task, model = trained_copier(kind)
    tokens = task.draw_cell((3,), 64, evaluation_generator(5, 3)).tokens
    given = {"end": task.eos_token_id, "pad": task.pad_token_id, "batch_tokens": 10**6}
    with torch.autocast("cpu", torch.bfloat16):
        decoded, forced = (
            score_answers(model, tokens[:, :4], tokens[:, 4:], method=method, **given)
            for method in ("generate", "teacher_forcing")
        )
    assert 0 < decoded.sum() < 64
    # rounding may turn a choice between two tokens that are as likely
    assert (decoded == forced).sum() >= 62


def test_forced_tokens_are_judged_one_by_one():
    task = build_task("copy", {"alphabet": 3})
    model = Oracle(task, lambda tokens: 1)
    prompts, answers = torch.tensor([[0, 0], [1, 1]]), torch.tensor([[1, 2, 1], [0, 0, 1]])
    right = forced_tokens(model, prompts, answers, pad=task.pad_token_id)
    assert right.tolist() == [[True, False, True], [False, False, True]]
    assert forced_accuracy(model, prompts, answers, pad=task.pad_token_id, batch_tokens=5) == pytest.approx(0.5)
