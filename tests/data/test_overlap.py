"""Evaluation text that also occurs in training text is found by content."""

import random

import numpy as np
import pytest

from equitape.data import overlap
from equitape.data.overlap import describe_overlap, find_overlap, hash_windows
from equitape.data.tokenizers import byte_tokenizer
from equitape.data.tokens import build_tokens


def prose(seed, words=4000):
    source = random.Random(seed)
    return " ".join("".join(source.choices("abcdefghijkl", k=source.randint(2, 9))) for _ in range(words))


def store(folder, cache, **texts):
    folder.mkdir()
    for name, text in texts.items():
        (folder / name).write_text(text)
    return build_tokens(str(folder), byte_tokenizer(), cache)


def test_hashes_are_of_windows_alone():
    tokens = np.random.default_rng(0).integers(0, 300, 200)
    hashes = hash_windows(tokens, 16)
    assert len(hashes) == 185
    assert len(np.unique(hashes)) == 185
    assert np.array_equal(hash_windows(tokens[40:], 16), hashes[40:])
    assert hash_windows(tokens[:16][::-1], 16)[0] != hashes[0]
    assert len(hash_windows(tokens[:15], 16)) == 0


@pytest.mark.parametrize("chunk", [4_000_000, 1000])
def test_copied_text_is_found_wherever_it_lies(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(overlap, "CHUNK_TOKENS", chunk)
    first, second, other = prose(1), prose(2), prose(3)
    scored = store(tmp_path / "scored", tmp_path / "cache", a=first, b=second)
    apart = store(tmp_path / "apart", tmp_path / "cache", c=other)
    assert find_overlap(apart, scored).found == 0
    assert describe_overlap("books", find_overlap(apart, scored)) == ""
    # one of the two documents, under another name, at another offset, inside other text
    mixed = store(tmp_path / "mixed", tmp_path / "cache", z=other[:777] + first + other)
    found = find_overlap(mixed, scored)
    assert found.documents == 1
    assert found.share == pytest.approx(0.5, abs=0.02)
    printed = describe_overlap("books", found)
    assert printed.startswith(f"{found.share:.1%} of books also occurs in the training data (1 document)")
    assert find_overlap(scored, scored).share == 1.0


def test_documents_shorter_than_a_window_are_not_compared(tmp_path):
    short = store(tmp_path / "short", tmp_path / "cache", a="too short")
    assert find_overlap(short, short).windows == 0
    assert find_overlap(short, short).share == 0.0
