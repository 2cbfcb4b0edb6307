"""Which token stands for [BOS]."""

from types import SimpleNamespace

import pytest

from equitape.inspect.load import begin_token_of


def named(bos, eos):
    return SimpleNamespace(bos_token_id=bos, eos_token_id=eos, vocab_size=10)


@pytest.mark.parametrize(
    ("config", "tokenizer", "expected"),
    [
        (named(1, 2), None, 1),
        (named(1, 2), named(3, 4), 3),
        # a beginning of the model's before an end of the tokenizer's
        (named(1, 2), named(None, 4), 1),
        (named(None, 2), named(None, 4), 4),
        (named(None, 2), None, 2),
        # several ends, and tokens beyond the vocabulary
        (named(None, [2, 5]), None, 0),
        (named(10, 2), None, 2),
        (named(None, None), None, 0),
    ],
)
def test_a_beginning_before_an_end(config, tokenizer, expected):
    assert begin_token_of(config, tokenizer) == expected
