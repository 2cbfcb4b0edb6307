"""Rotated values against their formula in complex numbers."""

import pytest
import torch

from cases import build, draw_tokens, gap, tiny_config
from equitape import EquitapeForCausalLM
from equitape.encodings.values import rotate_back, rotate_values
from equitape.nn import Attention, PositionalLayer, make_encoding

N, D = 6, 8


def as_complex(x):
    real, imaginary = x.double().chunk(2, dim=-1)
    return torch.complex(real, imaginary)


def as_halves(x):
    return torch.cat((x.real, x.imag), dim=-1)


def rotary_attention(layer, x, field, heads):
    """A causal layer with its own weights, in loops over heads and complex numbers: [B, N, C].

    field: complex [B, G, N, D / 2]. heads: number of key-value heads whose values are rotated.
    """
    groups = layer.geometry.num_kv_heads
    each = layer.geometry.num_heads // groups
    query, key, value = (
        as_complex(projection(x).unflatten(-1, (-1, D)).transpose(1, 2))
        for projection in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    visible = torch.ones(N, N).tril().bool()
    outputs = []
    for head in range(layer.geometry.num_heads):
        group = head // each
        z = field[:, group]
        scores = ((query[:, head] * z)[:, :, None] * (key[:, group] * z)[:, None].conj()).sum(-1).real / D**0.5
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1).to(z.dtype)
        rotates = group < heads
        found = weights @ (value[:, group] * z if rotates else value[:, group])
        outputs.append(as_halves(found * z.conj() if rotates else found))
    return layer.o_proj(torch.cat(outputs, dim=-1))


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
@pytest.mark.parametrize("kind", ["rope", "tape"])
def test_layer_equals_the_formula(kind, share):
    torch.manual_seed(0)
    whole = make_encoding({"kind": kind, "rotate_values": share}, 64, 8, 3, num_kv_heads=4, head_dim=D)
    layer = Attention(64, 8, whole, layer=0, num_kv_heads=4, head_dim=D).double()
    x, ids = torch.randn(2, N, 64, dtype=torch.float64), torch.arange(N) * 3
    state = layer.initial_state(ids, torch.float64)
    if kind == "tape":
        state = torch.randn(2, 4, N, D, dtype=torch.float64)
    found, _ = layer(x, state, positions=ids[None].expand(2, -1))
    field = as_complex(state).expand(2, 4, -1, -1)
    assert gap(found, rotary_attention(layer, x, field, round(4 * share))) < 1e-12
    assert gap(found, rotary_attention(layer, x, field, 0)) > 1e-2


@pytest.mark.parametrize("rotate", [rotate_values, rotate_back])
@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("batch", [1, 2])
def test_gradients(rotate, heads, batch):
    """Of values and output with two fields for four heads, shared by the batch or not."""
    torch.manual_seed(0)
    shape = (2, 4, 3, D) if rotate is rotate_values else (2, 3, 4, D)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    field = torch.randn(batch, 2, 3, D, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda x, field: rotate(x, field, heads), (x, field))


@pytest.mark.parametrize("case", ["rope-values", "tape2-values"])
def test_rotated_values_change_the_model(case):
    model = build(case)
    plain = EquitapeForCausalLM(tiny_config(case, {"rotate_values": 0.0})).double().eval()
    plain.load_state_dict(model.state_dict())
    tokens = draw_tokens(2, 9)
    assert gap(model(tokens).logits, plain(tokens).logits) > 1e-2
    # the first token attends to itself alone: its value is rotated and rotated back
    if case == "rope-values":
        assert gap(model(tokens).logits[:, 0], plain(tokens).logits[:, 0]) < 1e-12


def test_layers_without_rotation_rotate_no_values():
    options = {"unrotated_layers": [0, 1, 2]}
    rotated, plain = (build("rope", {"rotate_values": share}, **options) for share in (1.0, 0.0))
    tokens = draw_tokens(1, 7)
    assert torch.equal(rotated(tokens).logits, plain(tokens).logits)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("rope", {"rotate_values": 1.5}, "rotate_values is 1.5; it must be a number from 0 to 1"),
        ("tape", {"rotate_values": 0.2}, "selects none of 2 key-value heads; raise it to at least 0.5, or set it to 0"),
        ("tape2", {"rotate_values": 1.0, "carried_frequencies": 2}, "set rotate_values to 0, or leave out carried_fre"),
    ],
)
def test_rotations_that_mean_nothing_are_refused(kind, options, message):
    with pytest.raises(ValueError, match=message):
        tiny_config(kind, options)


def test_pieces_refuse_rotated_values():
    with pytest.raises(ValueError, match="rotates the output of attention back, which these pieces do not"):
        PositionalLayer(32, 4, {"kind": "tape", "rotate_values": 1.0})
