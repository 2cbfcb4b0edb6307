"""Learned and sinusoidal tables, xPos and RandPE against their formulas."""

import math

import pytest
import torch

from cases import build, draw_tokens, gap, tiny_config
from equitape.encodings import Geometry, Positions
from equitape.encodings.base import ENCODINGS

SIZES = Geometry(hidden_size=12, num_heads=2, num_kv_heads=2, head_dim=6, num_layers=2, max_positions=40)


def make(kind, **options):
    return ENCODINGS[kind](ENCODINGS[kind].options_class(**options), SIZES)


def test_sinusoids_by_their_formula():
    ids = torch.tensor([[0, 3, 11]])
    waves = make("sinusoidal", amplitude=1.0).embed(torch.zeros(1, 3, 12, dtype=torch.float64), Positions(ids=ids))
    for row, p in enumerate(ids[0].tolist()):
        for k in range(6):
            angle = p / 10000 ** (2 * k / 12)
            assert waves[0, row, 2 * k].item() == pytest.approx(math.sin(angle), abs=1e-12)
            assert waves[0, row, 2 * k + 1].item() == pytest.approx(math.cos(angle), abs=1e-12)


def test_learned_adds_the_row_of_each_id():
    encoding = make("learned")
    x = torch.randn(1, 3, 12)
    out = encoding.embed(x, Positions(ids=torch.tensor([[5, 0, 39]])))
    torch.testing.assert_close(out - x, encoding.table.weight[[5, 0, 39]][None])


def test_learned_refuses_ids_beyond_its_table():
    model = build("learned", {"num_positions": 10})
    with pytest.raises(ValueError, match=r"Position id 10 is beyond the learned table of 10 rows"):
        model(draw_tokens(1, 11))


def test_xpos_scores_by_their_formula():
    """q_i k_j decays by zeta_m^((i - j) / scale_base) at the angle theta_m (j - i)."""
    encoding = make("xpos", scale_base=4.0, gamma=0.5)
    layer = encoding.layer(0)
    ids = torch.tensor([[100, 103, 107]])
    positions = Positions(ids=ids, origin=torch.tensor([[100]]))
    state = encoding.initial_state(positions, torch.float64)
    q, k = torch.randn(1, 2, 3, 6, dtype=torch.float64), torch.randn(1, 2, 3, 6, dtype=torch.float64)
    turned_q, turned_k = layer.rotate(q, k, state)
    scores = turned_q @ turned_k.mT
    for i in range(3):
        for j in range(i + 1):
            total = 0.0
            for m in range(3):
                distance = (ids[0, i] - ids[0, j]).item()
                zeta = (2 * m / 6 + 0.5) / 1.5
                left, right = complex(q[0, 1, i, m], q[0, 1, i, m + 3]), complex(k[0, 1, j, m], k[0, 1, j, m + 3])
                angle = distance * 10000 ** (-2 * m / 6)
                turned = left * right.conjugate() * complex(math.cos(angle), math.sin(angle))
                total += zeta ** (distance / 4.0) * turned.real
            assert scores[0, 1, i, j].item() == pytest.approx(total, rel=1e-9)


def test_xpos_refuses_a_context_it_would_overflow_in():
    with pytest.raises(ValueError, match=r"use a scale_base of at least \d+"):
        tiny_config("xpos", max_position_embeddings=200_000)
    model = build("xpos", dtype=torch.bfloat16, max_position_embeddings=40_000)
    ids = torch.tensor([[0, 1, 39_998, 39_999]])
    assert torch.isfinite(model(draw_tokens(1, 4), position_ids=ids).logits).all()


def test_randpe_draws_sorted_ids_without_repetition():
    encoding = make("randpe", range=20)
    encoding.train()
    given = Positions(ids=torch.arange(15)[None])
    drawn = encoding.map_ids(given, torch.zeros(4, 15, 32), None).ids
    assert (drawn.diff(dim=-1) > 0).all()
    assert drawn.min() >= 0
    assert drawn.max() < 20
    assert len({tuple(row) for row in drawn.tolist()}) > 1
    encoding.eval()
    assert encoding.map_ids(given, torch.zeros(4, 15, 32), None) is given


def test_randpe_equals_rope_on_the_ids_it_drew():
    rope, randpe = build("rope"), build("randpe", {"sample_in_eval": True})
    randpe.load_state_dict(rope.state_dict())
    tokens = draw_tokens(1, 9)
    torch.manual_seed(4)
    found = randpe(tokens).logits
    torch.manual_seed(4)
    drawn = torch.rand(1, 64).argsort(-1)[:, :9].sort(-1).values
    assert gap(found, rope(tokens, position_ids=drawn).logits) < 1e-12


def test_randpe_refuses_more_tokens_than_its_range():
    model = build("randpe", {"range": 5}).train()
    with pytest.raises(ValueError, match="raise the option range to at least 6"):
        model(draw_tokens(1, 6))
