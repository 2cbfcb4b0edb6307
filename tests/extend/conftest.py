"""A tiny base and text for extensions."""

import os

import pytest

from words import write_text

CONTEXT = 32


@pytest.fixture(scope="session")
def room(tmp_path_factory):
    """A base with a byte tokenizer, text to train on, and held-out text."""
    # not above: pytest reads this file before tests/conftest.py chooses Triton's interpreter
    from equitape.data.tokenizers import byte_tokenizer
    from families import make_source

    folder = tmp_path_factory.mktemp("extend")
    os.environ["EQUITAPE_CACHE"] = str(folder / "cache")
    make_source(
        "llama-tied", vocab_size=258, max_position_embeddings=CONTEXT, eos_token_id=256, pad_token_id=257
    ).save_pretrained(folder / "base")
    byte_tokenizer().save_pretrained(folder / "base")
    write_text(folder / "data", documents=3, words=500)
    write_text(folder / "test", documents=2, words=500, first=7)
    yield folder
    del os.environ["EQUITAPE_CACHE"]
