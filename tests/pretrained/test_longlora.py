"""LongLoRA's shifted sparse attention: against masks written out by brute force, and only while training."""

from functools import partial
from itertools import pairwise

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask

import equitape.model.masks as masks
import equitape.model.preparation as preparation
from cases import build, draw_tokens, gap, tiny_config
from equitape.nn.backends import eager_attention, flexible_attention
from equitape.pretrained.longlora import GroupsAsRows, HalvesOfHeads, ShiftedSparseAttention

SIZES = [(4, 2), (6, 2), (9, 3), (3, 1)]


def shifted(case, group_size, **changes):
    """A small model that trains with shifted sparse attention."""
    model = build(case, **changes)
    model.model.training_attention = ShiftedSparseAttention(group_size)
    model.model.training_attention.check(model.config)
    return model


def oracle_mask(heads, tokens, size, segments=None, window=None):
    """[H, N, N], token by token, head by head."""
    mask = torch.zeros(heads, tokens, tokens, dtype=torch.bool)
    for head in range(heads):
        shift = 0 if head < heads // 2 else size // 2
        borders = [0] + [edge for edge in range(1, tokens) if (edge + shift) % size == 0] + [tokens]
        for start, end in pairwise(borders):
            for query in range(start, end):
                for key in range(start, query + 1):
                    apart = segments is not None and segments[query] != segments[key]
                    mask[head, query, key] = not apart and (window is None or query - key < window)
    return mask


def attention_weights(model, tokens, **inputs):
    return model(tokens, output_attentions=True, **inputs).attentions


@pytest.mark.parametrize("heads", SIZES)
@pytest.mark.parametrize("kind", ["rope", "tape"])
@pytest.mark.parametrize(("tokens", "size"), [(16, 4), (23, 8), (13, 5), (6, 8)])
def test_heads_see_what_the_oracle_says(heads, kind, tokens, size):
    """Weights are positive exactly where the mask allows, so every head is checked at every pair."""
    model = shifted(kind, size, attn_implementation="eager", num_attention_heads=heads[0],
        num_key_value_heads=heads[1], head_dim=8,
    ).train()  # fmt: skip
    segments = torch.arange(tokens)[None] // (tokens // 2 + 1)
    ids = draw_tokens(1, tokens)
    for given in (None, segments):
        inputs = {} if given is None else {"segment_ids": given}
        expected = oracle_mask(heads[0], tokens, size, None if given is None else given[0])
        for weights in attention_weights(model, ids, **inputs):
            assert torch.equal(weights[0] > 0, expected)


def test_the_oracle_differs_between_halves_and_from_full_attention():
    mask = oracle_mask(4, 16, 4)
    assert not torch.equal(mask[0], mask[2])
    assert torch.equal(mask[2], mask[3])
    assert not torch.equal(mask[0], torch.ones(16, 16).tril().bool())
    # the paper's roll puts the first two tokens behind the last two; here they see only themselves
    assert not mask[2, :2, 2:].any()


@pytest.mark.parametrize("kind", ["rope", "tape"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_causal_while_training(kind, implementation):
    """A later token changes nothing before it, the wrapped group of the original included."""
    model = shifted(kind, 4, attn_implementation=implementation).train()
    tokens = draw_tokens(1, 16)
    changed = tokens.clone()
    changed[:, 12:] = 1 + (tokens[:, 12:] + 5) % 40
    assert gap(model(tokens).logits[:, :12], model(changed).logits[:, :12]) < 1e-12


def test_padding_and_windows():
    model = shifted("rope", 8, sliding_window=3, sliding_layers=[1], attn_implementation="eager").train()
    tokens = draw_tokens(2, 20)
    mask = torch.ones_like(tokens)
    mask[1, :6] = 0
    weights = attention_weights(model, tokens, attention_mask=mask)
    for layer, window in enumerate((None, 3, None)):
        expected = oracle_mask(4, 20, 8, window=window)
        assert torch.equal(weights[layer][0] > 0, expected)
        expected[:, :, :6] = False
        assert torch.equal((weights[layer][1] > 0)[:, 6:], expected[:, 6:])


@pytest.mark.parametrize("kind", ["rope", "tape"])
def test_full_attention_after_training(kind):
    model = shifted(kind, 4)
    plain = build(kind)
    tokens = draw_tokens(2, 16)
    assert gap(model(tokens).logits, plain(tokens).logits) < 1e-12
    assert gap(model.train()(tokens).logits, plain(tokens).logits) > 1e-3


def test_gradients_under_checkpointing():
    tokens = draw_tokens(2, 16)
    gradients = []
    for checkpointed in (False, True):
        model = shifted("tape", 4).train()
        if checkpointed:
            model.gradient_checkpointing_enable()
        model(tokens, labels=tokens).loss.backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert all(gap(gradients[0][name], gradients[1][name]) < 1e-12 for name in gradients[0])


@pytest.mark.parametrize("heads", SIZES)
def test_block_masks_see_the_same(heads, monkeypatch):
    """What runs on CUDA, in two calls of FlexAttention, against the written-out mask; no gradient: torch has none here."""
    query = torch.randn(2, heads[0], 150, 16)
    key, value = torch.randn(2, heads[1], 150, 16), torch.randn(2, heads[1], 150, 32)
    config = build("rope", num_attention_heads=heads[0], num_key_value_heads=heads[1], head_dim=16).config
    monkeypatch.setattr(masks, "prefers_blocks", lambda call: True)
    x = torch.zeros(2, 150, 32)
    # plain rows would need no mask
    segments = torch.arange(150) // 90
    positions = masks.build_positions(build("rope").model.encoding, x, None, None, segments[None], None)
    hook = ShiftedSparseAttention(40)
    mask = masks.build_masks(config, build("rope").model.encoding, x, None, positions, None, True, hook)[
        "full_attention"
    ]
    assert isinstance(mask.attend, HalvesOfHeads)
    assert isinstance(mask.attend.first, BlockMask)
    assert isinstance(mask.attend.second, BlockMask)
    found = mask.attend(partial(flexible_attention, score_mod=None, scaling=0.25), query, key, value)
    expected, _ = eager_attention(
        torch.nn.Module(), query, key, value, oracle_mask(heads[0], 150, 40, segments)[None], 0.25
    )
    assert gap(found, expected) < 1e-5


@pytest.mark.parametrize("heads", SIZES)
@pytest.mark.parametrize(("tokens", "size"), [(16, 4), (24, 8), (23, 8), (13, 5), (6, 8), (3, 8), (9, 2)])
def test_groups_as_rows_see_the_same(heads, tokens, size, monkeypatch):
    """What runs for plain rows, without any mask: outputs and gradients."""
    model = shifted("tape", size, attn_implementation="sdpa", num_attention_heads=heads[0],
        num_key_value_heads=heads[1], head_dim=8,
    ).train()  # fmt: skip
    ids = draw_tokens(2, tokens)
    found, masks_seen = [], []
    monkeypatch.setattr(
        preparation, "build_masks", lambda *args: masks_seen.append(masks.build_masks(*args)) or masks_seen[-1]
    )
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        logits = model(ids, use_cache=False).logits
        found.append((logits, *torch.autograd.grad(logits.square().sum(), list(model.parameters()))))
    assert all(gap(*pair) < 1e-9 * (1 + pair[1].abs().max()) for pair in zip(*found, strict=True))
    assert [mask["full_attention"].attend for mask in masks_seen] == [GroupsAsRows(size), None]


@pytest.mark.parametrize("shift", [0, 4])
def test_compiled_for_any_length(shift):
    """The last group has any length, one token included: few graphs serve all lengths."""
    torch._dynamo.reset()
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph

    def attend(query, key, value, mask):
        attended = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return attended.transpose(1, 2)

    half = partial(GroupsAsRows(8)._attend, attend, shift=shift)
    compiled = torch.compile(half, fullgraph=True, backend=count)
    for tokens in (20, 33, 47, 29, 24, 60, 37, 52, 41, 70, 77, 85):
        heads = [torch.randn(1, 2, tokens, width) for width in (8, 8, 16)]
        assert gap(compiled(*heads), half(*heads)) < 1e-6
    # one for the first length alone, then one each for a last group of none, of one and of more tokens
    assert len(graphs) == 4


def test_a_compiled_model():
    torch._dynamo.reset()
    model = shifted("tape", 8, num_hidden_layers=2).train()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    ids = draw_tokens(1, 20)
    assert gap(compiled(ids, use_cache=False).logits, model(ids, use_cache=False).logits) < 1e-10


def test_refusals():
    with pytest.raises(ValueError, match="biases scores; use 'rope' or 'tape'"):
        shifted("t5", 4)
    with pytest.raises(ValueError, match="half of the heads are shifted by half a group"):
        ShiftedSparseAttention(1).check(tiny_config("rope"))
    model = shifted("rope", 4).train()
    past = model.eval()(draw_tokens(1, 4), use_cache=True).past_key_values
    with pytest.raises(ValueError, match=r"do not pass past_key_values, or call model.eval"):
        model.train()(draw_tokens(1, 4), past_key_values=past)


def test_a_configuration_of_an_earlier_version_is_read():
    """Models saved by version 0.1 have the field in config.json; groups were never meant to outlive a training run."""
    assert not hasattr(tiny_config("rope", shifted_group_size=None), "shifted_group_size")
    with pytest.warns(UserWarning, match="ignores 'shifted_group_size': equitape.adapt with the method 'longlora'"):
        assert not hasattr(tiny_config("rope", shifted_group_size=4), "shifted_group_size")
