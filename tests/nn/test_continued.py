"""Attention of new tokens to cached ones without a mask."""

import pytest
import torch
from transformers import DynamicCache

from cases import build, draw_tokens, gap
from equitape.model import masks
from equitape.nn import continued
from equitape.nn.continued import continued_attention, exact_part


@pytest.mark.parametrize(("new", "past"), [(5, 20), (20, 5), (1, 7), (9, 9)])
@pytest.mark.parametrize("width", [8, 24])
def test_both_parts_together_are_masked_attention(new, past, width):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 6, new, 16, generator=generator)
    key = 3 * torch.randn(2, 2, past + new, 16, generator=generator)
    value = torch.randn(2, 2, past + new, width, generator=generator)
    mask = torch.ones(new, past + new, dtype=torch.bool).tril(past)
    wanted = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=0.3, enable_gqa=True)
    found = continued_attention(query, key, value, 0.3, exact_part)
    assert gap(found, wanted.transpose(1, 2)) < 1e-5


def test_a_kernel_that_is_missing_is_not_used():
    """cuDNN's is missing on a CPU."""
    assert not continued.is_right(torch.device("cpu"), torch.bfloat16, (4, 2), (16, 32))


@pytest.mark.parametrize("kind", ["rope", "tape", "tape2", "fox"])
@pytest.mark.parametrize("kernel", [True, False])
def test_chunks_through_the_cache_are_one_pass(kind, kernel, monkeypatch):
    """The path of a GPU with an exact kernel, and with masks."""
    model, tokens, calls = build(kind), draw_tokens(2, 40), []
    monkeypatch.setattr(masks, "can_continue", lambda *given: kernel)
    monkeypatch.setattr(continued, "fused_part", lambda *given: calls.append(given) or exact_part(*given))
    with torch.no_grad():
        wanted = model(tokens).logits
        cache = DynamicCache(config=model.config)
        parts = [model(tokens[:, a:b], past_key_values=cache).logits for a, b in ((0, 11), (11, 30), (30, 40))]
    assert gap(torch.cat(parts, 1), wanted) < 1e-10
    # two halves of each of two chunks in three layers
    assert len(calls) == (12 if kernel else 0)
