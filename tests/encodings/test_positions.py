"""Positions against slow counting, over random masks, packings and caches."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equitape.encodings.positions import (
    default_ids,
    ids_within_runs,
    index_runs,
    key_ids,
    origin_with_cache,
    runs_from_restarts,
    sequence_extent,
)

CPU = torch.device("cpu")
rows_of_bits = st.integers(1, 3).flatmap(
    lambda rows: st.integers(1, 12).flatmap(
        lambda width: st.lists(st.lists(st.booleans(), min_size=width, max_size=width), min_size=rows, max_size=rows)
    )
)


@given(rows_of_bits, st.data())
@settings(max_examples=60, deadline=None)
def test_default_ids_count_real_tokens(mask, data):
    padding = torch.tensor(mask)
    past = data.draw(st.integers(0, padding.shape[1] - 1))
    found = default_ids(padding.shape[1] - past, past, padding, CPU)
    for row, bits in enumerate(mask):
        for column in range(past, len(bits)):
            if bits[column]:
                assert found[row, column - past] == sum(bits[:column])


@given(st.lists(st.integers(0, 2), min_size=1, max_size=14))
@settings(max_examples=60, deadline=None)
def test_runs_and_ids_within_them(segments):
    runs = index_runs(torch.tensor([segments]), None)[0].tolist()
    ids = ids_within_runs(torch.tensor([runs]))[0].tolist()
    for column, segment in enumerate(segments):
        continues = column > 0 and segments[column - 1] == segment
        assert runs[column] == (runs[column - 1] + (not continues) if column else 0)
        assert ids[column] == (ids[column - 1] + 1 if continues else 0)


def test_padding_forms_runs_of_its_own():
    runs = index_runs(torch.tensor([[5, 5, 5, 5]]), torch.tensor([[True, False, False, True]]))
    assert runs.tolist() == [[0, 1, 1, 2]]


def test_restarts_but_not_gaps_start_a_run():
    assert runs_from_restarts(torch.tensor([[3, 4, 9, 0, 1, 1, 2]])).tolist() == [[0, 0, 0, 1, 1, 2, 2]]


@given(rows_of_bits, st.integers(0, 50), st.data())
@settings(max_examples=80, deadline=None)
def test_key_ids_and_origin_with_a_cache(mask, start, data):
    """Tokens get consecutive ids from `start`; from those of the new ones, all the others are found again."""
    padding = torch.tensor(mask)
    width = padding.shape[1]
    past = data.draw(st.integers(0, width - 1))
    first = data.draw(st.integers(0, past))
    spare = data.draw(st.integers(0, 3))
    ids = start + (padding.long().cumsum(-1) - 1).clamp(min=0)
    # the first new token of every row must be real: ids are counted back from it
    padding[:, past] = True
    ids = start + (padding.long().cumsum(-1) - 1).clamp(min=0)
    for length in (past, torch.tensor(past)):
        found = key_ids(ids[:, past:], length, first, width - first + spare, padding)
        real = padding[:, first:]
        assert torch.equal(found[:, : width - first][real], ids[:, first:][real])
        origin = origin_with_cache(ids[:, past:], length, padding, ids[:, past:].amin(-1, keepdim=True))
        assert (origin == start).all()
    unpadded = torch.arange(start, start + width)[None]
    assert torch.equal(key_ids(unpadded[:, past:], past, first, width - first, None), unpadded[:, first:])


def test_extent_leaves_padding_out_and_keeps_runs_apart():
    ids = torch.tensor([[9, 4, 5, 6, 2, 3]])
    valid = torch.tensor([[False, True, True, True, True, True]])
    origin, span = sequence_extent(ids, None, valid)
    assert (origin.item(), span.item()) == (2, 5)
    origin, span = sequence_extent(ids, torch.tensor([[0, 1, 1, 1, 2, 2]]), valid)
    assert origin.tolist() == [[0, 4, 4, 4, 2, 2]]
    assert span.tolist() == [[1, 3, 3, 3, 2, 2]]
