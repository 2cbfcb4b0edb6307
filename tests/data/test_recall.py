"""Rows with planted facts."""

import pickle
import re

import pytest
import torch

from equitape.data.packing import PackedDataset
from equitape.data.recall import COLOURS, WORDINGS, RecallRows
from equitape.data.tokenizers import byte_tokenizer
from equitape.data.tokens import store_in_memory
from equitape.tasks.needle_kinds import ADJECTIVES, NOUNS

LENGTH = 2048
TOKENIZER = byte_tokenizer()
# the key and the code of a fact and of its question, in every wording
PATTERNS = [
    (r"The (\w+) door in (\w+) opens with the code (\d+)\.", r"opens the (\w+) door in (\w+)\? It opens with the code (\d+)\."),
    (r"\nCaptain (\w+) (\w+) left the port with (\d+) barrels\.", r"did Captain (\w+) (\w+) have\? .* with (\d+) barrels\."),
    (r"The book on (\w+) by (\w+) has the catalogue number (\d+)\.", r"Look up the book on (\w+) by (\w+)\. .* is (\d+)\."),
    (r"Ticket (\w+)-(\w+) was sold for (\d+)\.", r"was ticket (\w+)-(\w+) sold\? .* was (\d+)\."),
]


@pytest.fixture(scope="module")
def rows():
    """Ten rows of the character ~ in one document, and two short documents that share a row."""
    documents = [torch.full((size,), ord("~")).numpy() for size in (10 * LENGTH, 700, 800)]
    return PackedDataset(store_in_memory(documents, [len(each) for each in documents], TOKENIZER), LENGTH)


def read(row):
    return TOKENIZER.decode(row["input_ids"])


def planted_facts(text):
    """(facts, questions, number of the wording) of a row; None if it has none."""
    for number, (fact, question) in enumerate(PATTERNS):
        found = re.findall(fact, text), re.findall(question, text)
        if any(found):
            return *found, number
    return None


def test_every_question_is_about_a_fact_before_it(rows):
    planted = RecallRows(rows, TOKENIZER, 1.0)
    whole = [planted[index] for index in range(200) if "segment_ids" not in rows[index]]
    counts, wordings, places = set(), set(), set()
    for row in whole:
        text = read(row)
        facts, questions, wording = planted_facts(text)
        # every code is asked for once, after all facts, and keys differ
        assert facts and sorted(facts) == sorted(questions)
        assert len({(first, second) for first, second, _ in facts}) == len(facts)
        assert text.rindex("~") < min(text.rindex(code) for *_, code in facts)
        # what is not planted is the text, and everything but the first token is predicted
        assert text.count("~") >= LENGTH // 2
        assert row["labels"][0] == -100
        assert torch.equal(row["labels"][1:], row["input_ids"][1:])
        counts.add(len(facts))
        wordings.add(wording)
        places.add(text.index("\n"))
    assert wordings == set(range(len(PATTERNS)))
    assert len(counts) > 3 and max(counts) > 6 and len(places) > 20


def test_a_share_of_the_rows_and_none_of_several_pieces(rows):
    planted = RecallRows(rows, TOKENIZER, 0.5)
    changed = [index for index in range(200) if planted_facts(read(planted[index]))]
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
    assert not any(planted_facts(read(RecallRows(short, TOKENIZER, 1.0)[index])) for index in range(20))


def test_words_are_not_those_of_the_tasks():
    """Passkey and needles must not be learnt by heart."""
    words = {word.lower() for wording in WORDINGS for word in (*wording.firsts, *wording.seconds)}
    named = {word for word in words if word in ADJECTIVES or word in NOUNS}
    texts = " ".join(wording.fact + wording.question for wording in WORDINGS)
    assert not any(phrase in texts for phrase in ("pass key", "magic", "special"))
    # colours are adjectives of keys too; as a pair with a noun, no key of one is one of the other
    assert named <= set(COLOURS)
