"""Generation: prompts of any lengths together give what each gives alone, with the cache, without padding or spare logits."""

import logging

import pytest
import torch
from small import BYTES, evaluated, llama, our_model
from transformers.utils import logging as transformers_logging
from writing import prompts, write

from cases import DECODED
from equitape.data.tokenizers import byte_tokenizer
from equitape.evaluation import Unit
from equitape.tasks.decoding import FirstLine, batches_of, decode, end_tokens, write_answers, write_tokens


def alone(model, prompt, count):
    """Greedy decoding without cache, mask or generate."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
            if tokens[-1] == 256:
                break
    return tokens[len(prompt) :]


MODELS = {
    "llama": llama,
    **{case: lambda case=case: our_model(case) for case in DECODED},
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("lengths", [(9, 9, 9), (5, 13, 2, 9)], ids=["one length", "several"])
def test_answers_together_are_answers_alone(name, lengths):
    who = evaluated(MODELS[name]())
    given = prompts(*lengths)
    expected = [alone(who.model, prompt, 6) for prompt in given]
    assert who.mixes_lengths
    written = write_tokens(who, given, 6, [256])
    # rows that have ended are padded
    assert [row[: len(wanted)] for row, wanted in zip(written, expected, strict=True)] == expected
    assert len({tuple(row) for row in expected}) > 1


def test_beyond_the_context_nothing_but_the_reminder_is_left_out():
    """transformers warns once per process; other messages still appear."""
    printed = []
    handler = logging.Handler()
    handler.emit = lambda record: printed.append(record.getMessage())
    logger = logging.getLogger("transformers.generation.stopping_criteria")
    who = evaluated(llama(max_position_embeddings=16))
    generate = who.model.generate

    def speaking(*args, **kwargs):
        logger.warning("Something else.")
        return generate(*args, **kwargs)

    level = logger.level
    logger.setLevel(logging.WARNING)
    logger.addHandler(handler)
    try:
        transformers_logging.warning_once.cache_clear()
        who.model.generate = speaking
        write_tokens(who, prompts(20, 20), 3, [])
        assert printed == ["Something else."]
        # outside evaluations the warning is unchanged
        transformers_logging.warning_once.cache_clear()
        generate(torch.tensor(prompts(20)), attention_mask=torch.ones(1, 20), max_new_tokens=3, eos_token_id=None)
        assert any(text.startswith("This is a friendly reminder") for text in printed)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def test_models_without_a_joinable_cache_say_so():
    assert evaluated(our_model("tape")).mixes_lengths
    assert evaluated(llama()).mixes_lengths
    assert not evaluated(our_model("tape", sliding_window=7)).mixes_lengths
    sampled = evaluated(our_model("randpe-sampled"))
    assert not sampled.uses_cache
    assert not sampled.mixes_lengths


def test_a_model_that_refuses_a_cache_still_answers():
    who = evaluated(our_model("randpe-sampled"))
    assert len(write_answers(who, prompts(9, 9), 3)) == 2


def test_cache_bytes_are_those_of_the_cache():
    # two layers of keys (2 heads, 8 wide) and values; TAPE widens the first layer's values to twice that
    assert evaluated(llama()).cache_bytes == 2 * (2 * 8 + 2 * 8) * 8
    assert evaluated(our_model("tape")).cache_bytes == ((2 * 8 + 2 * 16) + (2 * 8 + 2 * 8)) * 8


@pytest.mark.parametrize("lengths", [(40, 40), (40, 33, 21)], ids=["one length", "several"])
@pytest.mark.parametrize("make", [our_model, llama], ids=["ours", "llama"])
def test_no_logits_but_the_last_and_one_new_token_a_step(make, lengths):
    model = make()
    heads, steps = [], []
    model.lm_head.register_forward_hook(lambda module, inputs, output: heads.append(tuple(output.shape)))
    model.model.register_forward_pre_hook(
        lambda module, inputs, kwargs: steps.append(
            (tuple(kwargs["input_ids"].shape), kwargs.get("attention_mask") is not None)
        ),
        with_kwargs=True,
    )
    who = evaluated(model)
    heads.clear(), steps.clear()
    write_answers(who, prompts(*lengths), 5)
    assert all(shape[1] == 1 for shape in heads)
    read = [shape for shape, _ in steps if shape[1] > 1]
    written = [shape for shape, _ in steps if shape[1] == 1]
    if len(set(lengths)) == 1:
        assert read == [(2, 40)]
    else:
        # one by one and whole, without a mask
        assert read == [(1, length - 1) for length in lengths]
        assert not any(masked for shape, masked in steps if shape[1] > 1)
    assert set(written) == {(len(lengths), 1)}
    assert len(written) <= 5


def test_attention_sees_no_mask_where_nothing_is_padded(monkeypatch):
    """A batch of one length goes to the fused kernel as causal: a dense mask would be quadratic in memory."""
    masks = []
    attention = torch.nn.functional.scaled_dot_product_attention

    def watched(query, key, value, attn_mask=None, *args, **kwargs):
        masks.append(attn_mask)
        return attention(query, key, value, attn_mask, *args, **kwargs)

    for make in (our_model, llama):
        who = evaluated(make())
        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
        write_answers(who, prompts(30, 30), 2)
        monkeypatch.undo()
    assert masks
    assert all(mask is None for mask in masks)


def test_the_first_line_ends_an_answer():
    tokenizer = byte_tokenizer()
    stop = FirstLine(tokenizer, 2)
    rows = [" yes\nmore", "\n\nno\nmore"]
    done = [stop(torch.tensor([list(row[: n + 1].encode()) for row in rows]), None).tolist() for n in range(9)]
    assert [first for first, _ in done].index(True) == 4
    assert [second for _, second in done].index(True) == 4
    assert decode(tokenizer, list(b" yes\nmore"), 9, [256], True) == ("yes", False)
    assert decode(tokenizer, list(b"\n\nno\n"), 9, [256], True) == ("no", False)
    assert decode(tokenizer, [*b"yes\n", 256, *b"more"], 9, [256], False) == ("yes\n", False)


@pytest.mark.parametrize("one_line", [True, False])
def test_answers_at_the_limit_are_stopped_unless_they_have_ended(one_line):
    tokenizer = byte_tokenizer()
    assert decode(tokenizer, list(b"yes"), 3, [256], one_line) == ("yes", True)
    assert decode(tokenizer, [*b"ye", 256], 3, [256], one_line) == ("ye", False)
    # other rows of the batch went on
    assert decode(tokenizer, [*b"y", 256, 257], 3, [256], one_line) == ("y", False)
    assert decode(tokenizer, list(b"ye\n"), 3, [256], one_line).stopped is not one_line


def test_what_ends_answers():
    model = llama()
    model.generation_config.eos_token_id = [5, 256]
    assert end_tokens(evaluated(model)) == [256, 5]


def test_settings_of_the_checkpoint_do_not_leak_in():
    """A checkpoint may ship sampling and penalties for chats; scores are of greedy decoding."""
    who = evaluated(llama())
    given = prompts(12, 12)
    expected = write_tokens(who, given, 8, [256])
    config = who.model.generation_config
    config.do_sample, config.temperature, config.repetition_penalty, config.top_k = True, 3.0, 5.0, 3
    config.no_repeat_ngram_size, config.max_length, config.min_new_tokens = 1, 14, None
    assert write_tokens(who, given, 8, [256]) == expected


def unit(length, key):
    return Unit(key=str(key), length=length)


def test_batches_by_length():
    units = [unit(length, key) for key, length in enumerate([10, 30, 20, 30, 10, 10])]
    apart = list(batches_of(units, 60, mix=False))
    assert [[u.length for u in batch] for batch in apart] == [[30, 30], [20], [10, 10, 10]]
    mixed = list(batches_of(units, 60, mix=True))
    assert [[u.length for u in batch] for batch in mixed] == [[30, 30], [20, 10, 10], [10]]
    # a unit longer than the budget still has its batch
    assert [[u.length for u in batch] for batch in batches_of(units, 1, mix=True)] == [
        [30],
        [30],
        [20],
        [10],
        [10],
        [10],
    ]
    assert BYTES == 258


def test_a_checkpoint_may_not_choose_words():
    """Its own settings for generation would, on one way of writing and not on the other."""
    who = evaluated(llama())
    free = write(who, "generate", prompts(9, 9), 5)
    own = who.model.generation_config
    own.suppress_tokens = [row[0] for row in free]
    own.begin_suppress_tokens = own.suppress_tokens
    assert write(who, "generate", prompts(9, 9), 5) == free
    assert write(who, "steps", prompts(9, 9), 5) == free
    assert who.model.generation_config is own
