"""Rows hold every token once, and no label crosses a document."""

import time
from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from cases import build, gap
from equitape.data.packing import IGNORED, PackedDataset, collate_rows, pack_pieces
from equitape.data.text import Document
from equitape.data.tokenizers import byte_tokenizer
from equitape.data.tokens import TokenStore, build_tokens, store_in_memory, write_tokens

PAD = byte_tokenizer().pad_token_id


def make_store(lengths) -> TokenStore:
    """Documents whose tokens are all different, so that each says where it came from."""
    starts = np.cumsum([0, *lengths])
    documents = [np.arange(a, b) + 1000 for a, b in pairwise(starts)]
    return store_in_memory(documents, list(lengths), byte_tokenizer())


def slow_labels(row, document_of):
    """Labels derived token by token: the token itself, where the one before it in the row is its own predecessor."""
    tokens = row["input_ids"].tolist()
    labels = []
    for place, token in enumerate(tokens):
        before = tokens[place - 1] if place else None
        follows = token != PAD and before is not None and before != PAD and before == token - 1
        labels.append(token if follows and document_of[token] == document_of[before] else IGNORED)
    return labels


lengths_of_documents = st.lists(st.integers(1, 40), min_size=1, max_size=30)


@settings(max_examples=150, deadline=None)
@given(lengths_of_documents, st.integers(2, 17), st.booleans())
def test_every_token_once_and_every_label_by_a_slow_loop(lengths, length, shuffle):
    dataset = PackedDataset(make_store(lengths), length, shuffle=shuffle)
    document_of = dict(enumerate(np.repeat(np.arange(len(lengths)), lengths).tolist(), start=1000))
    seen, padding = [], 0
    for number in range(len(dataset)):
        row = dataset[number]
        tokens = row["input_ids"].tolist()
        assert len(tokens) == length
        assert all(values.dtype == torch.long for values in row.values())
        assert row["labels"].tolist() == slow_labels(row, document_of)
        seen += [token for token in tokens if token != PAD]
        padding += tokens.count(PAD)
        pieces = 1 + sum(label == IGNORED for label in row["labels"].tolist()[1:])
        whole = PAD not in tokens and pieces == 1
        assert whole == ("segment_ids" not in row)
        if not whole:
            # segments change exactly where a label is missing, and padding forms no segment
            segments = row["segment_ids"].tolist()
            for place in range(1, length):
                new_piece = row["labels"][place] == IGNORED and tokens[place] != PAD
                both_padding = tokens[place] == tokens[place - 1] == PAD
                ends = tokens[place] == PAD and tokens[place - 1] != PAD
                assert (segments[place] != segments[place - 1]) == bool(new_piece or ends)
                assert not (both_padding and segments[place] != 0)
    assert sorted(seen) == list(range(1000, 1000 + sum(lengths)))
    report = dataset.report
    assert (report.tokens, report.padding, report.rows) == (sum(lengths), padding, len(dataset))
    assert (report.documents, report.skipped_documents, report.dropped_tokens) == (len(lengths), 0, 0)


@settings(max_examples=60, deadline=None)
@given(lengths_of_documents, st.integers(2, 12), st.integers(1, 30), st.booleans())
def test_what_is_left_out_is_reported(lengths, length, min_tokens, drop):
    least = max(min_tokens, length if drop else 1)
    expected = [size for size in lengths if size >= least]
    if not expected:
        with pytest.raises(ValueError, match=f"No document has {least} tokens; the longest has {max(lengths)}"):
            PackedDataset(make_store(lengths), length, min_tokens=min_tokens, drop_remainders=drop)
        return
    dataset = PackedDataset(make_store(lengths), length, min_tokens=min_tokens, drop_remainders=drop)
    kept = sum(size - size % length if drop else size for size in expected)
    report = dataset.report
    assert (report.documents, report.skipped_documents) == (len(expected), len(lengths) - len(expected))
    assert (report.tokens, report.dropped_tokens) == (kept, sum(lengths) - kept)
    rows = [dataset[number] for number in range(len(dataset))]
    assert sum(int((row["input_ids"] != PAD).sum()) for row in rows) == kept
    if drop:
        assert report.padding == 0
        assert not any("segment_ids" in row for row in rows)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 20), max_size=40), st.integers(20, 25))
def test_pieces_fill_rows_well(sizes, length):
    rows = pack_pieces(sizes, length)
    assert sorted(piece for row in rows for piece in row) == list(range(len(sizes)))
    fill = [sum(sizes[piece] for piece in row) for row in rows]
    assert all(0 < used <= length for used in fill)
    # no two rows could have been one
    assert all(one + other > length for one, other in combinations(fill, 2))


def test_many_short_documents_leave_little_padding():
    generator = np.random.default_rng(0)
    lengths = generator.lognormal(5.5, 1.0, 5000).astype(int).clip(1)
    report = PackedDataset(make_store(lengths), 1024).report
    assert report.padding / (report.padding + report.tokens) < 0.001
    assert "5,000 documents" in str(report)
    assert "0.0" in str(report)
    assert "skipped" not in str(report)
    assert "skipped: " in str(PackedDataset(make_store(lengths), 1024, min_tokens=100).report)


def test_epochs_go_on_and_each_has_its_own_order():
    store = make_store([7] * 50)
    dataset = PackedDataset(store, 7, seed=3)
    rows = dataset.report.rows
    firsts = [[int(dataset[epoch * rows + i]["input_ids"][0]) for i in range(rows)] for epoch in range(3)]
    assert all(sorted(first) == sorted(firsts[0]) for first in firsts)
    assert firsts[0] != firsts[1] != firsts[2] != firsts[0]
    # whoever asks, and in whatever order
    again = PackedDataset(store, 7, seed=3)
    assert int(again[2 * rows + 5]["input_ids"][0]) == firsts[2][5]
    assert int(again[4]["input_ids"][0]) == firsts[0][4]
    other = PackedDataset(store, 7, seed=4)
    assert [int(other[i]["input_ids"][0]) for i in range(rows)] != firsts[0]
    plain = PackedDataset(store, 7, shuffle=False)
    assert [int(plain[i]["input_ids"][0]) for i in range(rows + 1)] == [1000 + 7 * (i % rows) for i in range(rows + 1)]
    with pytest.raises(IndexError, match=r"Row numbers start at 0; got -1"):
        dataset[-1]
    assert len(PackedDataset(store, 7, size=10**9)) == 10**9


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_order_does_not_depend_on_workers(tmp_path, workers):
    (tmp_path / "a.txt").write_text("".join(f"line {n}\n" for n in range(60)))
    (tmp_path / "b.txt").write_text("short")
    store = build_tokens(tmp_path, byte_tokenizer(), tmp_path / "cache")
    dataset = PackedDataset(store, 16, seed=1, size=100)
    loader = DataLoader(dataset, batch_size=4, num_workers=workers, collate_fn=collate_rows)
    batches = [batch["input_ids"] for batch in loader]
    assert torch.cat(batches).equal(torch.stack([dataset[i]["input_ids"] for i in range(100)]))


def test_collate_mixes_whole_rows_with_packed_ones():
    dataset = PackedDataset(make_store([8, 3, 4]), 8, shuffle=False)
    whole, packed = dataset[0], dataset[1]
    assert set(collate_rows([whole, whole])) == {"input_ids", "labels"}
    batch = collate_rows([whole, packed])
    assert batch["segment_ids"].tolist() == [[1] * 8, [1, 1, 1, 1, 2, 2, 2, 0]]
    assert batch["input_ids"].shape == batch["labels"].shape == (2, 8)


@pytest.mark.parametrize("case", ["tape", "rope", "alibi"])
def test_a_packed_row_gives_the_loss_of_its_documents_apart(case):
    """The model's own loss over packed rows is the mean over the documents run one by one."""
    model = build(case, pad_token_id=PAD, vocab_size=258)
    texts = ["the first document is cut into rows", "short", "tiny", "another one"]
    documents = [np.frombuffer(text.encode(), np.uint8).astype(np.int64) for text in texts]
    store = store_in_memory(documents, [len(document) for document in documents], byte_tokenizer())
    dataset = PackedDataset(store, 16)
    batch = collate_rows([dataset[i] for i in range(len(dataset))])
    output = model(**batch)
    flat = output.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
    loss = torch.nn.functional.cross_entropy(*flat, ignore_index=IGNORED)
    total, count = 0.0, 0
    for document in documents:
        for piece in torch.from_numpy(document).split(16):
            if len(piece) > 1:
                logits = model(piece[None]).logits[0, :-1]
                total += torch.nn.functional.cross_entropy(logits, piece[1:], reduction="sum")
                count += len(piece) - 1
    assert int((batch["labels"] != IGNORED).sum()) == count
    assert gap(loss, total / count) < 1e-10
    # transformers forms its loss in float32
    assert gap(output.loss, total / count) < 1e-6


def test_layout_is_fast():
    """Rows of a long run must not wait for their plan."""
    lengths = np.random.default_rng(0).integers(1, 3000, 200_000)
    store = make_store([1])
    store.starts = np.concatenate(([0], np.cumsum(lengths)))
    began = time.process_time()
    dataset = PackedDataset(store, 2048)
    assert dataset.report.tokens == lengths.sum()
    # CPU time, and an order of magnitude above what it takes
    assert time.process_time() - began < 10


def test_refusals():
    with pytest.raises(ValueError, match=r"Row length is 1; it must be at least 2"):
        PackedDataset(make_store([5]), 1)


def test_documents_of_text_end_in_the_end_mark(tmp_path):
    store = build_tokens_of(["ab", "cde"], tmp_path)
    row = PackedDataset(store, 8)[0]
    assert row["input_ids"].tolist() == [*b"cde", 256, *b"ab", 256, PAD]
    assert row["labels"].tolist() == [IGNORED, *b"de", 256, IGNORED, *b"b", 256, IGNORED]
    assert row["segment_ids"].tolist() == [1, 1, 1, 1, 2, 2, 2, 0]


def build_tokens_of(texts, folder):
    write_tokens([Document("", text) for text in texts], byte_tokenizer(), folder / "store")
    return TokenStore.open(folder / "store")
