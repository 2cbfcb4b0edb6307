"""PaTH against products of its matrices, multiplied one by one."""

import pytest
import torch
from torch import nn

from cases import build, draw_tokens, gap, tiny_config
from equitape import EquitapeForCausalLM
from equitape.encodings import ENCODINGS, Geometry, Positions, path
from equitape.kernels import reflections

SIZES = Geometry(hidden_size=12, num_heads=4, num_kv_heads=2, head_dim=6, num_layers=1)
N = 21


def random_layer():
    encoding = ENCODINGS["path"](ENCODINGS["path"].options_class(rank=5), SIZES)
    layer = encoding.layer(0).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.7)
    return layer


def matrices(layer, hidden):
    """I - beta_t w_t w_t^T of every token and key-value head: [G, N, D, D]."""
    read = (hidden @ layer.down.weight.T @ layer.up.weight.T)[0].T[None]
    taps = layer.taps.flatten(0, 1)[:, None]
    mixed = nn.functional.conv1d(nn.functional.pad(read, (2, 0)), taps, groups=taps.shape[0])[0]
    w = nn.functional.silu(mixed).unflatten(0, (2, 6)).transpose(1, 2)
    w = w / (w.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    beta = 2 * (hidden[0] @ layer.strength.T + layer.strength_bias).sigmoid().T
    return torch.eye(6, dtype=hidden.dtype) - beta[..., None, None] * w[..., :, None] * w[..., None, :]


def multiplied_scores(layer, hidden, query, key):
    """[H, N, N], zero for later keys."""
    factors = matrices(layer, hidden).repeat_interleave(2, 0)
    key = key[0].repeat_interleave(2, 0)
    rows = []
    for i in range(N):
        product, row = torch.eye(6, dtype=hidden.dtype).expand(4, -1, -1), [torch.zeros(4)] * (N - i - 1)
        for j in range(i, -1, -1):
            row.insert(0, torch.einsum("hd,hde,he->h", query[0, :, i], product, key[:, j]))
            product = product @ factors[:, j]
        rows.append(torch.stack(row, dim=-1))
    return torch.stack(rows, dim=1)


@pytest.mark.parametrize("block", [4, 64])
def test_scores_and_gradients_are_those_of_multiplied_matrices(monkeypatch, block):
    monkeypatch.setattr(reflections, "BLOCK", block)
    torch.manual_seed(0)
    layer = random_layer()
    hidden, query, key = (
        torch.randn(shape, dtype=torch.float64, requires_grad=True)
        for shape in ((1, N, 12), (1, 4, N, 6), (1, 2, N, 6))
    )
    visible = torch.ones(1, 1, N, N, dtype=torch.bool).tril()
    positions = Positions(ids=torch.arange(N)[None])
    columns = layer.columns(hidden, positions, None, torch.float64, 0.5)
    wide_query, wide_key = columns.put(query, key)
    found = (wide_query.unflatten(1, (2, 2)) @ wide_key[:, :, None].mT).flatten(1, 2) * 0.5
    found = found + layer.bias(wide_query, wide_key, None, positions, positions.ids, visible, 0.5)
    found, expected = found[0].tril(), multiplied_scores(layer, hidden, query, key) * 0.5
    assert gap(found, expected) < 1e-12
    inputs = (hidden, query, key, *layer.parameters())
    weights = torch.randn(4, N, N, dtype=torch.float64)
    gradients = [torch.autograd.grad((scores * weights).sum(), inputs) for scores in (found, expected)]
    assert all(gap(ours, theirs) < 1e-11 for ours, theirs in zip(*gradients, strict=True))
    assert all(gradient.abs().max() > 1e-3 for gradient in gradients[1])


def test_products_do_not_grow_over_many_equal_reflections():
    """The strongest reflection, 3,000 times: H^t k is k or its mirror image, also if its direction is rounded up."""
    torch.manual_seed(0)
    key, query = torch.randn(1, 1, 3000, 8), torch.randn(1, 1, 1, 8)
    direction = torch.zeros_like(key)
    direction[..., 0] = 1.4219
    change = path.reflected_products(query, key, direction, torch.tensor([[2999]]))
    expected = -2 * query[0, 0, 0, 0] * key[0, 0, :, 0] * (torch.arange(2999, -1, -1) % 2)
    # each step rounds a few times
    assert gap(change[0, 0, 0], expected) < 4 * 3000 * torch.finfo(torch.float32).eps * expected.abs().max()


def test_a_token_reads_two_before_it():
    """The direction is made from three tokens; cached decoding of longer rows than a block equals the full pass."""
    model = build("path", max_position_embeddings=256)
    tokens = draw_tokens(1, 140)
    with torch.no_grad():
        full = model(tokens, use_cache=False).logits
        first = model(tokens[:, :130], use_cache=True)
        second = model(tokens[:, 130:], past_key_values=first.past_key_values).logits
    assert gap(second, full[:, 130:]) < 1e-10


def test_starts_with_reflections_of_strength_one():
    model = EquitapeForCausalLM(tiny_config("path"))
    layer = model.model.layers[0].self_attn.encoding
    assert layer.strength_bias.abs().max() == 0
    assert layer.strength.std().item() == pytest.approx(0.02, rel=0.3)
    # uniform up to 1 / sqrt(3)
    assert 0.4 < layer.taps.abs().max() <= 3**-0.5


def test_columns_inside_heads_are_refused():
    with pytest.raises(ValueError, match="'path' reflects all channels of a head; set decay_inside to false"):
        tiny_config("path", {"decay": "gate", "decay_inside": True})
