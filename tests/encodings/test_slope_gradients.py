"""Gradients of learned slopes through attention kernels that round as fused ones do."""

import pytest
import torch

from equitape.encodings import Geometry, Positions, build_encoding

N, DIM = 1024, 32
SIZES = Geometry(hidden_size=32, num_heads=4, num_kv_heads=4, head_dim=DIM, num_layers=2)
FUTURE = torch.ones(N, N, dtype=torch.bool).triu(1)


class HalfAttention(torch.autograd.Function):
    """Causal attention that sums in float32, and rounds probabilities and the gradients of scores to the inputs' dtype.

    Flash attention's kernels do so: both enter matrix products of half precision.
    """

    @staticmethod
    def forward(ctx, query, key, value):
        q, k, v = (x.float() for x in (query, key, value))
        probabilities = (q @ k.mT * DIM**-0.5).masked_fill(FUTURE, -torch.inf).softmax(-1)
        output = (probabilities.to(value.dtype).float() @ v).to(value.dtype)
        ctx.save_for_backward(query, key, value, output, probabilities)
        return output

    @staticmethod
    def backward(ctx, gradient):
        query, key, value, output, probabilities = ctx.saved_tensors
        dtype, g = query.dtype, gradient.float()
        of_scores = probabilities * (g @ value.float().mT - (g * output.float()).sum(-1, keepdim=True))
        of_scores = of_scores.to(dtype).float() * DIM**-0.5
        of_value = probabilities.to(dtype).float().mT @ g
        return tuple(x.to(dtype) for x in (of_scores @ key.float(), of_scores.mT @ query.float(), of_value))


def exact_attention(query, key, value):
    scores = query @ key.mT * DIM**-0.5
    return scores.masked_fill(FUTURE, -torch.inf).softmax(-1) @ value


@pytest.mark.parametrize("inside", [False, True])
def test_rounded_kernels_keep_the_gradients_of_slopes(inside):
    generator = torch.Generator().manual_seed(0)
    query, key, value, gradient = (torch.randn(1, 4, N, DIM, generator=generator).bfloat16() for _ in range(4))
    ids = 37 + torch.arange(N)[None]
    positions = Positions(ids=ids, origin=ids.amin(-1, keepdim=True))

    def slope_gradients(attention, dtype):
        layer = build_encoding({"kind": "rope", "decay": "learned", "decay_inside": inside}, SIZES).layer(0)
        layer = layer.to(torch.promote_types(dtype, torch.float32))
        columns = layer.columns(torch.zeros(1, N, 32, dtype=dtype), positions, None, dtype, DIM**-0.5)
        q, k = columns.put(query.to(dtype) / 2, key.to(dtype))
        attention(q, k, value.to(dtype)).backward(gradient.to(dtype))
        return layer.decay.bias.grad.double()

    exact = slope_gradients(exact_attention, torch.float64)
    rounded = slope_gradients(HalfAttention.apply, torch.bfloat16)
    assert (rounded - exact).norm() < 0.03 * exact.norm()
