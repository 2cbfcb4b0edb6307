"""Attention that reads a paged cache in place, against plain attention of one request at a time."""

import pytest
import torch
from devices import DEVICES, needs_triton

from cases import gap

pytestmark = needs_triton
CASES = {
    # query heads, key-value heads, key, value, row
    "rope": (2, 2, 16, 16, 16),
    "a wider value": (4, 2, 16, 32, 24),
    "a wider key": (3, 1, 24, 32, 32),
    "a narrow key": (2, 1, 4, 32, 18),
}
REQUESTS = {
    # new tokens and keys of each request
    "decoding": [(1, 70), (1, 3), (1, 1)],
    "mixed": [(5, 5), (1, 66), (0, 0), (18, 40)],
    "prompts": [(40, 40), (3, 9)],
}


@pytest.mark.parametrize("requests", REQUESTS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("device", DEVICES)
def test_plain_attention_agrees(case, requests, device):
    from equitape.kernels.triton_paged import paged_attention

    heads, groups, key, value, row = CASES[case]
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(device)

    lengths = torch.tensor(REQUESTS[requests])
    ends = torch.nn.functional.pad(lengths.cumsum(0), (0, 0, 1, 0))
    num_tokens, num_keys = ends[-1].tolist()
    first, second = draw(200, groups, row), draw(200, groups, row)
    rows = torch.randperm(200, generator=generator)[:num_keys].to(device)
    # two tokens of padding
    query = draw(num_tokens + 2, heads, key)
    found = paged_attention(
        query, first, second, rows, ends[:, 0].int().to(device), ends[:, 1].int().to(device), (key, value), 0.3
    )
    start = min(value, row)
    for (count, held), (begin, key_begin) in zip(lengths.tolist(), ends[:-1].tolist(), strict=True):
        own = rows[key_begin : key_begin + held]
        keys = first[own, :, :key].repeat_interleave(heads // groups, 1)
        values = torch.cat((second[own, :, :start], first[own, :, key : key + value - start]), dim=-1)
        scores = torch.einsum("nhd,khd->hnk", query[begin : begin + count], keys) * 0.3
        seen = torch.ones(count, held, dtype=torch.bool, device=device).tril(held - count)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        expected = torch.einsum("hnk,khe->nhe", weights, values.repeat_interleave(heads // groups, 1))
        assert not count or gap(found[begin : begin + count], expected) < 1e-5
