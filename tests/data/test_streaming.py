"""Streamed rows: the same for everyone, every token once an epoch, resumed by skipping."""

import json
import pickle
from itertools import islice

import pytest
import torch
from torch.utils.data import DataLoader

from equitape.data import tokens
from equitape.data.packing import PackedDataset, collate_rows
from equitape.data.streaming import StreamedRows
from equitape.data.tokenizers import byte_tokenizer
from equitape.data.tokens import build_tokens

LENGTH = 16


@pytest.fixture
def source(tmp_path, monkeypatch):
    # documents reach the tokenizer a few at a time, as large ones would
    monkeypatch.setattr(tokens, "BATCH_CHARACTERS", 50)
    path = tmp_path / "rows.jsonl"
    texts = [f"document {n} " + "word " * (n * 7 % 23) for n in range(40)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def streamed(source, **options):
    return StreamedRows(source, byte_tokenizer(), LENGTH, **{"block_rows": 8, **options})


def rows_in_epoch(source):
    """Found by reading until all tokens have come."""
    total = build_tokens(source, byte_tokenizer(), source.parent / "cache").num_tokens
    dataset, count = streamed(source), 0
    while total > 0:
        total -= int((dataset[count]["input_ids"] != 257).sum())
        count += 1
    assert total == 0
    return count


def pieces(rows):
    """All segments of some rows, sorted."""
    found = []
    for row in rows:
        segments = row.get("segment_ids", torch.ones(LENGTH, dtype=torch.long))
        for segment in segments[segments > 0].unique():
            found.append(row["input_ids"][segments == segment].tolist())
    return sorted(found)


def test_an_epoch_holds_what_the_packed_dataset_holds(source):
    packed = PackedDataset(build_tokens(source, byte_tokenizer(), source.parent / "cache"), LENGTH)
    stream = streamed(source)
    count = rows_in_epoch(source)
    assert pieces(stream[i] for i in range(count)) == pieces(packed[i] for i in range(len(packed)))
    # the next epoch holds the same in another order
    second = [stream[count + i] for i in range(count)]
    assert pieces(second) == pieces(packed[i] for i in range(len(packed)))
    again = streamed(source)
    assert not all(row["input_ids"].equal(again[i]["input_ids"]) for i, row in enumerate(second))


def test_every_block_is_filled_before_the_next_begins(source):
    """Documents are shuffled within a block, so one of a single document would be hardly any shuffling."""
    store = build_tokens(source, byte_tokenizer(), source.parent / "cache")
    expected, block = [], []
    for length in store.lengths.tolist():
        block.append(length)
        if sum(block) >= 8 * LENGTH:
            expected.append(block)
            block = []
    expected += [block] if block else []
    assert len(expected) > 5
    blocks = list(islice(streamed(source)._read_blocks(), 2 * len(expected)))
    assert [block.store.lengths.tolist() for block in blocks] == 2 * expected


def test_rows_can_be_skipped_and_asked_for_again(source):
    stream = streamed(source)
    rows = [stream[i]["input_ids"] for i in range(120)]
    resumed = streamed(source)
    assert resumed[97]["input_ids"].equal(rows[97])
    assert resumed[98]["input_ids"].equal(rows[98])
    assert resumed[3]["input_ids"].equal(rows[3])
    travelled = pickle.loads(pickle.dumps(resumed))
    assert travelled[5]["input_ids"].equal(rows[5])


def test_the_seed_decides_the_order(source):
    first = torch.stack([streamed(source)[i]["input_ids"] for i in range(8)])
    other = torch.stack([streamed(source, seed=1)[i]["input_ids"] for i in range(8)])
    assert not first.equal(other)
    plain = streamed(source, shuffle=False)
    # the first document is shorter than a row; whole rows come first
    assert bytes(plain[0]["input_ids"].tolist()) == b"document 1 word "


@pytest.mark.parametrize("workers", [0, 2])
def test_order_does_not_depend_on_workers(source, workers):
    dataset = streamed(source, size=60)
    loader = DataLoader(dataset, batch_size=4, num_workers=workers, collate_fn=collate_rows)
    rows = torch.cat([batch["input_ids"] for batch in loader])
    fresh = streamed(source)
    assert rows.equal(torch.stack([fresh[i]["input_ids"] for i in range(60)]))


def test_short_documents_and_remainders_can_be_left_out(source):
    stream = streamed(source, drop_remainders=True)
    assert not any("segment_ids" in stream[i] for i in range(30))
    with pytest.raises(ValueError, match=r"No document has 5000 tokens; use longer documents"):
        streamed(source, min_tokens=5000)[0]


def test_refusals(source):
    with pytest.raises(ValueError, match=r"There is no file or folder"):
        StreamedRows(source.parent / "lost", byte_tokenizer(), LENGTH)
    with pytest.raises(ValueError, match=r"block_rows is 0"):
        streamed(source, block_rows=0)
    with pytest.raises(IndexError, match=r"Row numbers start at 0"):
        streamed(source)[-1]
