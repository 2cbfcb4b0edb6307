"""Flash attention over packed sequences, with a stand-in for the CUDA kernel that demands what the kernel needs."""

import pytest
import torch

from equitape.nn import backends


def reference_kernel(query, key, value, ends, key_ends, longest, longest_keys, dropout, causal, debug, **settings):
    """Attention of one sequence after another; raises where the CUDA kernel would read at an odd address."""
    for x in (query, key, value):
        assert x.shape[-1] % 8 == 0
        assert not any(step % 8 for step in (x.storage_offset(), *x.stride()[:-1]))
        assert x.stride(-1) == 1
    assert key.shape == value.shape
    outputs = []
    for begin, end, first, last in zip(ends[:-1], ends[1:], key_ends[:-1], key_ends[1:], strict=True):
        q, k, v = query[begin:end], key[first:last], value[first:last]
        repeat = q.shape[1] // k.shape[1]
        scores = torch.einsum("nhd,mhd->hnm", q, k.repeat_interleave(repeat, 1)) * settings["scale"]
        distance = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
        hidden = distance < 0
        if settings["window_size_left"] is not None:
            hidden |= distance > settings["window_size_left"]
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hnm,mhd->nhd", weights, v.repeat_interleave(repeat, 1)))
    return (torch.cat(outputs),)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(("key_width", "value_width", "row_width"), [(24, 40, 36), (12, 20, 16), (16, 32, 48)])
def test_rows_that_begin_anywhere(monkeypatch, window, key_width, value_width, row_width):
    """Keys and values are slices of wider rows, as in a paged cache; heads have any width."""
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", reference_kernel, raising=False)
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 4, 5, key_width, generator=generator, dtype=torch.float64)
    rows = torch.randn(1, 2, 11, row_width + value_width, generator=generator, dtype=torch.float64)
    key, value = rows[..., :key_width], rows[..., row_width : row_width + value_width]
    ends, key_ends = torch.tensor([0, 1, 5], dtype=torch.int32), torch.tensor([0, 5, 11], dtype=torch.int32)
    found = backends.varlen_attention(query, key, value, (ends, key_ends), (4, 6), 0.3, window)
    for begin, end, first, last in ((0, 1, 0, 5), (1, 5, 5, 11)):
        scores = query[:, :, begin:end] @ key[:, :, first:last].repeat_interleave(2, 1).mT * 0.3
        distance = torch.arange(last - first - end + begin, last - first)[:, None] - torch.arange(last - first)
        visible = (distance >= 0) & (distance < (window or last))
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        expected = (weights @ value[:, :, first:last].repeat_interleave(2, 1)).transpose(1, 2)
        torch.testing.assert_close(found[:, begin:end], expected, rtol=0, atol=1e-12)
