"""Inspections: pooled honestly, windows, encodings that have little to show, refusals."""

import numpy as np
import pytest
import torch

from cases import CACHEABLE, build, draw_tokens
from equitape.inspect import inspect_model, measure_stability, visit_layers

# what is shown is kept in float32, whatever the model computes in; sums over a text round more than once
ROUNDING = 1e-6


def test_without_pooling_maps_are_the_attention_itself():
    model, tokens = build("tape"), draw_tokens(1, 14)
    inspection = inspect_model(model, tokens)
    records = []
    visit_layers(model, tokens, lambda index, record: records.append(record))
    assert np.allclose(inspection.attention, torch.stack([record.attention for record in records]), atol=ROUNDING)
    assert inspection.notes() == []
    assert inspection.cells.bounds == [(index, index) for index in range(14)]


@pytest.mark.parametrize(("length", "cells"), [(14, 5), (15, 7), (40, 16), (9, 2)])
def test_pooled_attention_keeps_all_of_it(length, cells):
    """By hand: mean over the queries of a cell, sum over the keys of a cell; rows still add up to one."""
    model, tokens = build("tape"), draw_tokens(1, length)
    inspection, full = inspect_model(model, tokens, max_cells=cells), inspect_model(model, tokens)
    assert len(inspection.cells.bounds) <= cells
    assert inspection.cells.bounds[-1][1] == length - 1
    assert np.allclose(inspection.attention.sum(-1), 1, atol=10 * ROUNDING)
    for row, (first, last) in enumerate(inspection.cells.bounds):
        for column, (start, end) in enumerate(inspection.cells.bounds):
            block = full.attention[:, :, first : last + 1, start : end + 1]
            assert np.allclose(inspection.attention[:, :, row, column], block.sum(-1).mean(-1), atol=ROUNDING)
            product = full.products[:, first : last + 1, start : end + 1].mean((1, 2))
            assert np.allclose(inspection.products[:, row, column], product, atol=10 * ROUNDING)
    assert f"{length} tokens as" in " ".join(inspection.notes())


def test_moves_that_pooling_or_a_window_hides_are_mentioned():
    model, tokens = build("tape"), draw_tokens(1, 24)
    moved = "attention moved by the update"
    full, pooled, part = (inspect_model(model, tokens, **more) for more in ({}, {"max_cells": 4}, {"show": (12, 24)}))
    for hiding in (pooled, part):
        assert np.all(np.array(hiding.by_layer()[moved][1:]) < np.array(full.by_layer()[moved][1:]))
        assert any("moved by the update is counted between the cells shown" in note for note in hiding.notes())
    assert full.notes() == []
    assert not any("moved by" in note for note in inspect_model(build("rope"), tokens, max_cells=4).notes())


def test_a_window_shows_its_tokens_while_the_model_reads_all():
    model, tokens = build("tape"), draw_tokens(1, 20)
    full, part = inspect_model(model, tokens), inspect_model(model, tokens, show=(6, 15))
    assert np.allclose(part.attention, full.attention[:, :, 6:15, 6:15], atol=ROUNDING)
    assert np.allclose(part.norms, full.norms[:, :, 6:15])
    assert np.allclose(part.mixing_strength, full.mixing_strength[:, 6:15], equal_nan=True)
    assert np.allclose(part.mixing_own, full.mixing_own[:, 6:15], equal_nan=True)
    assert part.samples == list(range(6, 15))
    assert "tokens 6 to 14 of 20" in part.notes()[0]


def test_first_layer_is_unmoved_and_later_ones_are_not():
    inspection = inspect_model(build("tape"), draw_tokens(1, 16))
    assert np.abs(inspection.attention_change[0]).max() < 1e-6
    assert np.abs(inspection.attention_change[1:]).max() > 1e-2
    assert np.allclose(inspection.norms[0], 1)
    assert inspection.displacement[0].max() < 1e-6
    assert inspection.displacement[1:].max() > 0.1
    assert np.nanmax(np.abs(inspection.distances[0] - inspection.true_distances())) < 1e-3
    assert np.nanmax(np.abs(inspection.distances[1] - inspection.true_distances())) > 0.1
    assert np.isnan(inspection.mixing_strength[2]).all()
    assert not np.isnan(inspection.mixing_strength[:2]).any()
    assert np.isnan(inspection.past_only(inspection.attention)).sum() == 3 * 4 * 16 * 15 / 2


def test_change_is_what_the_update_adds_to_the_attention_of_rope():
    """Signed: above zero where the updated state makes a query look more at a key."""
    model, tokens = build("tape"), draw_tokens(1, 12)
    rope = build("rope")
    rope.load_state_dict(model.state_dict(), strict=False)
    found = {"tape": [], "rope": []}
    visit_layers(model, tokens, lambda index, record: found["tape"].append(record.attention))
    visit_layers(rope, tokens, lambda index, record: found["rope"].append(record.attention))
    inspection = inspect_model(model, tokens)
    for layer, (moved, plain) in enumerate(zip(found["tape"], found["rope"], strict=True)):
        assert np.allclose(inspection.attention_change[layer], moved - plain, atol=ROUNDING)
    assert np.abs(inspection.attention_change).max() > 1e-2


@pytest.mark.parametrize("case", ["tape", "tape-options"])
def test_mixing_by_plain_loops(case):
    """Strength and own part of every token's matrix, the second one's complex."""
    model, tokens = build(case), draw_tokens(1, 9)
    inspection, layers = inspect_model(model, tokens), []
    visit_layers(model, tokens, lambda index, record: layers.append(record.mixing))

    def size(matrix):
        return sum(abs(number) ** 2 for row in matrix.tolist() for number in row) ** 0.5

    mixed = [index for index, mixing in enumerate(layers) if mixing is not None]
    assert mixed
    for layer in mixed:
        common = sum(layers[layer]) / 9
        for token, matrix in enumerate(layers[layer]):
            own = size(matrix - common)
            assert inspection.mixing_strength[layer, token] == pytest.approx(size(matrix), rel=1e-5)
            assert inspection.mixing_own[layer, token] == pytest.approx(own / (own + size(common)), rel=1e-5)


def test_tape_at_its_start_shows_no_change():
    model = build("tape")
    for name, parameter in model.named_parameters():
        if name.endswith((".carry", ".mix_out")):
            torch.nn.init.zeros_(parameter)
    inspection = inspect_model(model, draw_tokens(1, 12))
    assert np.abs(inspection.attention_change).max() == 0
    assert np.nanmax(np.abs(inspection.distances - inspection.true_distances())) < 1e-3


@pytest.mark.parametrize("local", [{"kind": "rope", "theta": 30.0}, "nope"], ids=["rope", "nope"])
def test_layers_with_an_encoding_of_their_own_have_no_state_to_show(local):
    """Gemma 3 begins with such layers; displacement and distances are those of the model's own encoding."""
    window = {"sliding_window": 6, "sliding_layers": [0, 2], "local_encoding": local, "num_hidden_layers": 5}
    model, tokens = build("tape", {"layers": [3]}, **window), draw_tokens(1, 12)
    inspection = inspect_model(model, tokens)
    # its own encoding starts in the second layer, and only the fourth updates
    displacement = inspection.displacement.max((1, 2))
    assert np.isnan(displacement[[0, 2]]).all()
    assert (displacement[[1, 3]] < 1e-5).all()
    assert displacement[4] > 1e-2
    moved = inspection.by_layer()["effective minus true distance, tokens"]
    assert moved[0] is moved[2] is None
    assert moved[1] < 1e-3
    own = measure_stability(model, tokens, begin_token=1).changes[0].products
    assert [value is None for value in own] == [True, False, True, False, False]


@pytest.mark.parametrize("case", CACHEABLE)
def test_every_encoding_can_be_looked_at(case):
    model = build(case, dtype=torch.float32)
    inspection = inspect_model(model, draw_tokens(1, 9))
    assert np.allclose(inspection.attention.sum(-1), 1, atol=10 * ROUNDING)
    encoding = model.model.encoding
    assert (inspection.norms is not None) == encoding.has_field
    assert (inspection.products is not None) == (encoding.has_field or encoding.kind == "tensor_tape")
    assert inspection.updates == (encoding.kind in ("tape", "tape2", "tensor_tape"))


def test_long_texts_are_sampled_evenly():
    inspection = inspect_model(build("tape", dtype=torch.float32, max_position_embeddings=256), draw_tokens(1, 200))
    assert len(inspection.samples) == 64
    assert (inspection.samples[0], inspection.samples[-1]) == (0, 199)
    assert set(np.diff(inspection.samples)) <= {3, 4}
    assert "64 evenly spaced tokens" in " ".join(inspection.notes())


@pytest.mark.parametrize("case", ["tape", "tape-options", "tensor_tape"])
def test_half_precision_can_be_looked_at(case):
    exact, half = (
        inspect_model(build(case, dtype=dtype), draw_tokens(1, 9)) for dtype in (torch.float64, torch.bfloat16)
    )
    # the first layer differs by rounding alone
    assert np.abs(half.attention[0] - exact.attention[0]).max() < 0.05
    assert np.isfinite(half.products).all()


def test_refusals():
    model = build("tape")
    with pytest.raises(ValueError, match=r"shape \[2, 6\]"):
        inspect_model(model, draw_tokens(2, 6))
    with pytest.raises(ValueError, match="3 labels for 6 tokens"):
        inspect_model(model, draw_tokens(1, 6), ["a", "b", "c"])
    with pytest.raises(ValueError, match=r"tokens 2 to 9: .* 6 tokens"):
        inspect_model(model, draw_tokens(1, 6), show=(2, 9))
    with pytest.raises(ValueError, match="max_cells is 1"):
        inspect_model(model, draw_tokens(1, 6), max_cells=1)
