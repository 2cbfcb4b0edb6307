"""The kernel of ring attention: values wider than keys, grouped heads, and their gradients."""

import pytest
import torch

from cases import gap
from equitape.nn.ring import attend, attend_backward

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("width", [16, 32, 40])
def test_outputs_and_gradients_are_those_of_plain_attention(device, causal, width):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    dtype = torch.bfloat16 if device == "cuda" else torch.float64
    generator = torch.Generator().manual_seed(0)
    query, key, value, gradient = (
        torch.randn(2, heads, 24, columns, generator=generator, dtype=torch.float64).to(device, dtype).requires_grad_()
        for heads, columns in ((4, 16), (2, 16), (2, width), (4, width))
    )
    wide = [x.double() for x in (query, key, value)]
    scores = wide[0] @ wide[1].repeat_interleave(2, 1).transpose(-1, -2) * 0.3
    if causal:
        scores = scores.masked_fill(torch.ones(24, 24, device=device).triu(1).bool(), -torch.inf)
    expected = scores.softmax(-1) @ wide[2].repeat_interleave(2, 1)
    wanted = torch.autograd.grad(expected, (query, key, value), gradient.double())
    with torch.no_grad():
        output, sums, *rest = attend(query, key, value, is_causal=causal, scale=0.3)
        found = attend_backward(
            query, key, value, output, sums, is_causal=causal, scale=0.3, gradient=gradient, rest=rest
        )
    limit = 0.05 if device == "cuda" else 1e-12
    assert gap(output, expected) < limit
    assert gap(sums.double(), scores.logsumexp(-1)) < max(limit, 1e-6)
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape
        assert gap(one, other) < limit * max(1.0, other.abs().max().item())
