"""The tensor form: scores as eq. 6 writes them, and which mixings keep which symmetry."""

import random

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from cases import build, draw_tokens, gap, tiny_config
from equitape.encodings import Geometry, Positions
from equitape.encodings.base import ENCODINGS

SIZES = Geometry(hidden_size=16, num_heads=2, num_kv_heads=2, head_dim=8, num_layers=2)


def make(**options):
    cls = ENCODINGS["tensor_tape"]
    return cls(cls.options_class(**options), SIZES)


@pytest.mark.parametrize(("channels", "components", "init"), [(2, 2, "rope"), (1, 4, "fourier"), (4, 3, "fourier")])
def test_scores_as_equation_6(channels, components, init):
    encoding = make(channels=channels, components=components, init=init)
    layer = encoding.layer(0)
    ids = torch.tensor([[0, 4, 9]])
    state = encoding.initial_state(Positions(ids=ids), torch.float64)
    blocks = 8 // channels
    e = state[0].unflatten(-1, (blocks, channels, components))
    q, k = torch.randn(1, 2, 3, 8, dtype=torch.float64), torch.randn(1, 2, 3, 8, dtype=torch.float64)
    left, right = layer.rotate(q, k, state)
    scores = left @ right.mT
    for head in range(2):
        for i in range(3):
            for j in range(3):
                total = 0.0
                for m in range(blocks):
                    # channel l of block m is number l * M + m
                    q_m, k_m = q[0, head, i, m::blocks], k[0, head, j, m::blocks]
                    total = total + q_m @ (e[head, i, m] @ e[head, j, m].T) @ k_m
                torch.testing.assert_close(scores[0, head, i, j], total)


def test_rope_start_is_rope():
    tensor, rope = build("tensor_tape"), build("rope")
    tensor.load_state_dict({**tensor.state_dict(), **rope.state_dict()})
    for layer in tensor.model.layers[:-1]:
        torch.nn.init.zeros_(layer.self_attn.encoding.carry)
        torch.nn.init.zeros_(layer.self_attn.encoding.mix_out)
    assert gap(tensor(draw_tokens(2, 9)).logits, rope(draw_tokens(2, 9)).logits) < 1e-12


@pytest.mark.parametrize("scale", [0.0, 0.5])
def test_spread_of_the_weights_at_the_start(scale):
    sizes = Geometry(hidden_size=16, num_heads=64, num_kv_heads=32, head_dim=8, num_layers=2)
    cls = ENCODINGS["tensor_tape"]
    layer = cls(cls.options_class(init_scale=scale), sizes).layer(0)
    torch.manual_seed(0)
    layer.reset_parameters(0.02)
    # carried from 64 heads, mixed from 32 groups to a mixer of four times as many
    expected = {"carry": scale / 8, "mix_in": 32**-0.5, "mix_out": scale * 128**-0.5}
    for name, std in expected.items():
        assert getattr(layer, name).std().item() == pytest.approx(std, rel=0.1)


@pytest.mark.parametrize("mix_over", ["heads", "heads+channels", "heads+components", "maximal"])
def test_orthogonal_equivariance_of_the_mixings(mix_over, monkeypatch):
    """Rotating the components of all frequencies alike: only mixing over components breaks it (a shift, which rotates every
    frequency by its own angle, is broken by the maximal form too; see the contract tests)."""
    model = build("tensor_tape", {"mix_over": mix_over})
    rotation = torch.linalg.qr(torch.randn(2, 2, dtype=torch.float64))[0]
    initial_state = model.model.encoding.initial_state
    tokens = draw_tokens(1, 8)
    expected = model(tokens).logits

    def turned(positions, dtype):
        state = initial_state(positions, dtype)
        return (state.unflatten(-1, (-1, 2)) @ rotation).flatten(-2)

    monkeypatch.setattr(model.model.encoding, "initial_state", turned)
    difference = gap(model(tokens).logits, expected)
    assert (difference < 1e-10) == (mix_over != "heads+components")


@pytest.mark.parametrize("seed", [0, 1])
def test_fourier_features_have_the_kernel_they_should(seed):
    """e_i e_j^T depends on i - j alone, and its diagonal is sum_r w^2 2 / R."""
    encoding = make(channels=2, components=6, init="fourier", seed=seed)
    state = encoding.initial_state(Positions(ids=torch.tensor([[0, 5, 3, 8]])), torch.float64)[0, 0]
    e = state.unflatten(-1, (4, 2, 6))
    torch.testing.assert_close(e[0] @ e[1].mT, e[2] @ e[3].mT)
    torch.testing.assert_close(e[0].square().sum(-1), e[3].square().sum(-1))
    # No file of a model holds the features, so the order of the draws must stay: frequencies, then amplitudes.
    draw = random.Random(seed)
    for _ in range(4 * 3):
        draw.random()
    for block in range(4):
        for channel in range(2):
            diagonal = sum(draw.gauss(0.0, 1.0) ** 2 for _ in range(3)) * 2 / 6
            assert e[0, block, channel].square().sum().item() == pytest.approx(diagonal, rel=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"init": "rop"}, "Did you mean 'rope'"),
        ({"mix_over": "head"}, "Did you mean 'heads'"),
        ({"channels": 0}, "of 1 or more"),
        ({"channels": 3, "init": "fourier"}, "which must divide it"),
        ({"channels": 4}, "Use init='fourier'"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        tiny_config("tensor_tape", options)


def test_no_token_has_a_matrix_product_of_its_own():
    """On a GPU thousands of products of 2 x 2 matrices take longer than all else."""
    model = build("tensor_tape", dtype=torch.float32, attn_implementation="sdpa")
    rows, length = 2, 24
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as trace:
        model(draw_tokens(rows, length), labels=draw_tokens(rows, length), use_cache=False).loss.backward()
    products = [event.input_shapes[0][0] for event in trace.events() if event.name == "aten::bmm"]
    assert products
    assert max(products) < rows * length
