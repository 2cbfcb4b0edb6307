"""Rows with planted facts."""

import pickle
import re

import pytest
import torch

from equitape.data.packing import PackedDataset
from equitape.data.recall import RecallRows
from equitape.data.tokenizers import byte_tokenizer
from equitape.data.tokens import store_in_memory

LENGTH = 2048
TOKENIZER = byte_tokenizer()
FACT = r"The (\w+) door in (\w+) opens with the code (\d+)\."
QUESTION = r"Which code opens the (\w+) door in (\w+)\? It opens with the code (\d+)\."


@pytest.fixture(scope="module")
def rows():
    """Ten rows of the letter z in one document, and two short documents that share a row."""
    documents = [torch.full((size,), ord("z")).numpy() for size in (10 * LENGTH, 700, 800)]
    return PackedDataset(store_in_memory(documents, [len(each) for each in documents], TOKENIZER), LENGTH)


def read(row):
    return TOKENIZER.decode(row["input_ids"])


def test_every_question_is_about_a_fact_before_it(rows):
    planted = RecallRows(rows, TOKENIZER, 1.0)
    whole = [planted[index] for index in range(len(rows)) if "segment_ids" not in rows[index]]
    assert len(whole) == 10
    for row in whole:
        text = read(row)
        facts, questions = (re.findall(pattern, text) for pattern in (FACT, QUESTION))
        assert len(facts) == LENGTH // 512
        assert sorted(facts) == sorted(questions)
        assert text.index("Which code") > text.rindex("door in", 0, text.index("Which code"))
        # what is not planted is the text, and everything but the first token is predicted
        assert text.count("z") > LENGTH // 2
        assert row["labels"][0] == -100
        assert torch.equal(row["labels"][1:], row["input_ids"][1:])
    places = {text.index("The ") for text in map(read, whole)}
    assert len(places) > 5


def test_a_share_of_the_rows_and_none_of_several_pieces(rows):
    planted = RecallRows(rows, TOKENIZER, 0.5)
    changed = [index for index in range(200) if "door" in read(planted[index])]
    assert 60 < len(changed) < 120
    assert all("segment_ids" not in rows[index] for index in changed)
    assert len(planted) == len(rows)
    kept = next(index for index in range(200) if index not in changed)
    assert torch.equal(planted[kept]["input_ids"], rows[kept]["input_ids"])


def test_a_row_depends_on_seed_and_number_alone(rows):
    planted = RecallRows(rows, TOKENIZER, 1.0, seed=3)
    first = [planted[index] for index in (4, 0)]
    again = pickle.loads(pickle.dumps(planted))
    assert all(torch.equal(row["input_ids"], again[i]["input_ids"]) for row, i in zip(first, (4, 0), strict=True))
    other = RecallRows(rows, TOKENIZER, 1.0, seed=4)
    assert any(read(other[index]) != read(planted[index]) for index in range(3))


def test_rows_without_room_stay(rows):
    short = PackedDataset(rows.store, 64)
    assert all("door" not in read(RecallRows(short, TOKENIZER, 1.0)[index]) for index in range(20))
