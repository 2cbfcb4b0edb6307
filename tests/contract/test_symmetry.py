"""Shift invariance and causality, for every encoding, with random weights."""

import pytest
import torch

from cases import CASES, build, draw_tokens, gap

FAR = 1_000_000


def shifted(model, tokens, offset):
    ids = torch.arange(tokens.shape[1])[None] + offset
    with torch.no_grad():
        return model(tokens, position_ids=ids).logits


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-8), (torch.float32, 1e-4)])
def test_shift_of_all_ids(case, dtype, limit):
    model = build(case, dtype=dtype)
    if model.model.encoding.cache_refusal and "sampled" in case:
        pytest.skip("draws its ids at random; a shift of what it is given plays no part")
    tokens = draw_tokens(2, 12)
    offset = FAR if case != "learned" else 40
    difference = gap(shifted(model, tokens, offset), shifted(model, tokens, 0))
    if model.model.encoding.shift_invariant:
        assert difference < limit
    else:
        # the declaration must not hide a case that is invariant after all
        assert difference > 1e-3


@pytest.mark.parametrize("case", CASES)
def test_later_tokens_change_nothing_before_them(case):
    model = build(case)
    tokens = draw_tokens(2, 12)
    changed = tokens.clone()
    changed[:, 8:] = draw_tokens(2, 4, seed=1)
    longer = torch.cat((tokens, draw_tokens(2, 3, seed=2)), dim=1)
    with torch.no_grad():
        torch.manual_seed(1)
        before = model(tokens).logits
        torch.manual_seed(1)
        after = model(changed).logits
        torch.manual_seed(1)
        extended = model(longer).logits
    assert gap(before[:, :8], after[:, :8]) < 1e-12
    assert gap(before[:, 8:], after[:, 8:]) > 1e-3
    if "sampled" in case:
        return
    difference = gap(before, extended[:, :12])
    assert (difference < 1e-12) == model.model.encoding.causal


@pytest.mark.parametrize("case", ["tape", "tape-options", "tape-fourier", "rope", "cope"])
def test_order_of_ids_matters(case):
    """Ids are read at all (CoPE counts keys instead, so for it they are not)."""
    model = build(case)
    tokens = draw_tokens(1, 10)
    ids = torch.arange(10)[None]
    stretched = ids * 3
    with torch.no_grad():
        difference = gap(model(tokens, position_ids=ids).logits, model(tokens, position_ids=stretched).logits)
    assert (difference > 1e-3) == (case != "cope")
