"""Standalone layers on a GPU: fused kernels agree with plain attention in every direction."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from cases import gap, randomise
from equitape.nn import TapeAttention, grid_ids

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def layer(dtype=torch.bfloat16, **options):
    attention = TapeAttention(256, 4, num_kv_heads=2, **options)
    randomise(attention)
    return attention.to("cuda", dtype)


def draw(tokens, dtype=torch.bfloat16):
    return torch.randn(2, tokens, 256, generator=torch.Generator().manual_seed(0)).to("cuda", dtype)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_fused_layers_agree_with_plain_attention(causal, compiled):
    fused, plain = layer(causal=causal, num_axes=2), layer(torch.float32, causal=causal, num_axes=2)
    plain.implementation = "eager"
    x, ids = draw(16 * 16), grid_ids(16, 16, device=torch.device("cuda"))
    run = torch.compile(fused, fullgraph=True) if compiled else fused
    for ours, theirs in zip(run(x, positions=ids), plain(x.float(), positions=ids), strict=True):
        assert gap(ours, theirs) < 0.03 * float(theirs.abs().max())


def test_a_block_mask_trains_as_a_dense_one():
    def near(batch, head, query, key):
        return (query // 128 == key // 128) | (key < 128)

    dense = near(0, 0, torch.arange(512, device="cuda")[:, None], torch.arange(512, device="cuda"))
    blocks = create_block_mask(near, None, None, 512, 512, device="cuda")
    found = []
    for mask in (blocks, dense):
        attention = layer(torch.float32, causal=False)
        y, state = attention(draw(512, torch.float32), mask=mask)
        (y.square().sum() + state.square().sum()).backward()
        found.append([y, state, *(weight.grad for weight in attention.parameters())])
    for ours, theirs in zip(*found, strict=True):
        assert gap(ours, theirs) < 1e-2 * float(theirs.abs().max())


def test_cross_attention_is_fused():
    fused, plain = layer(), layer(torch.float32)
    plain.implementation = "eager"
    x, context = draw(64), draw(200)
    ours = fused(x, context=context)
    theirs = plain(x.float(), context=context.float())
    assert gap(ours[0], theirs[0]) < 0.03 * float(theirs[0].abs().max())
