"""query_growth: queries that grow with the logarithm of the tokens read."""

import math

import pytest
import torch

from cases import build, draw_tokens, tiny_config
from equitape.encodings import Positions
from equitape.inspect.certificate import certify

GROWTH = {"query_growth": 0.7, "query_growth_start": 5}
KINDS = ["rope", "nope", "alibi", "fire", "tape", "tape2", "path-gate"]


def factor(tokens):
    """The factor of the last of so many tokens."""
    return 1 + 0.7 * math.log(max(tokens / 5, 1))


@pytest.mark.parametrize("case", KINDS)
def test_queries_are_scaled_by_the_tokens_read(case):
    """One block, so that the output at a token depends on its own query alone: scale the projection instead."""
    plain, grown = (build(case, num_hidden_layers=1, **more) for more in ({}, GROWTH))
    tokens = draw_tokens(2, 12)
    with torch.no_grad():
        found = grown(tokens).logits
        projection = plain.model.layers[0].self_attn.q_proj
        weight = projection.weight.clone()
        for index in range(12):
            projection.weight.copy_(factor(index + 1) * weight)
            torch.testing.assert_close(found[:, index], plain(tokens).logits[:, index])
        projection.weight.copy_(weight)
    assert not torch.allclose(found[:, 6], plain(tokens).logits[:, 6], atol=1e-4)


@pytest.mark.parametrize("case", KINDS)
def test_cached_one_token_at_a_time(case):
    model, tokens = build(case, **GROWTH), draw_tokens(2, 11)
    with torch.no_grad():
        expected, past = model(tokens, use_cache=False).logits, None
        for index in range(11):
            output = model(tokens[:, index : index + 1], past_key_values=past, use_cache=True)
            past = output.past_key_values
            torch.testing.assert_close(output.logits[:, 0], expected[:, index])


@pytest.mark.parametrize("case", ["rope", "tape2"])
def test_padding_and_packing_count_their_own_tokens(case):
    model, first, second = build(case, **GROWTH), draw_tokens(1, 9), draw_tokens(1, 7, seed=1)
    with torch.no_grad():
        alone = [model(tokens).logits for tokens in (first, second)]
        padded = torch.nn.functional.pad(first, (4, 0))
        mask = torch.ones_like(padded)
        mask[:, :4] = 0
        torch.testing.assert_close(model(padded, attention_mask=mask).logits[:, 4:], alone[0])
        segments = torch.tensor([[0] * 9 + [1] * 7])
        packed = model(torch.cat((first, second), dim=1), segment_ids=segments).logits
    torch.testing.assert_close(packed, torch.cat(alone, dim=1))


def test_jumps_do_not_count():
    """NoPE reads no ids, so jumps change nothing, and the factors stay those of the tokens read."""
    model, tokens = build("nope", **GROWTH), draw_tokens(1, 12)
    jumps = torch.zeros_like(tokens)
    jumps[:, 3] = 1000
    with torch.no_grad():
        torch.testing.assert_close(model(tokens, position_jumps=jumps).logits, model(tokens).logits)


@pytest.mark.parametrize("case", ["rope", "tape2"])
def test_ids_do_not_count(case):
    """Neither a shift of all ids nor gaps between them: queries grow with the tokens read, also from a cache."""
    model, tokens = build(case, **GROWTH), draw_tokens(2, 12)
    ids = torch.arange(12)[None] + 1000
    padding = torch.ones_like(tokens)
    with torch.no_grad():
        expected = model(tokens).logits
        torch.testing.assert_close(model(tokens, position_ids=ids).logits, expected)
        past = model(tokens[:, :7], position_ids=ids[:, :7], use_cache=True).past_key_values
        given = {"position_ids": ids[:, 7:], "past_key_values": past, "attention_mask": padding}
        torch.testing.assert_close(model(tokens[:, 7:], **given).logits, expected[:, 7:])
        static = {"cache_implementation": "static", "disable_compile": True, "max_new_tokens": 4, "do_sample": False}
        known = {"attention_mask": padding, "output_logits": True, "return_dict_in_generate": True, "min_new_tokens": 4}
        found = [model.generate(tokens, position_ids=given, **static, **known) for given in (ids, ids - 1000)]
        assert torch.equal(found[0].sequences, found[1].sequences)
        torch.testing.assert_close(torch.stack(found[0].logits), torch.stack(found[1].logits))
        torch.testing.assert_close(found[0].logits[0], expected[:, -1].float())
    gaps = build("nope", **GROWTH)
    with torch.no_grad():
        torch.testing.assert_close(gaps(tokens, position_ids=3 * ids).logits, gaps(tokens).logits)


def test_certified_as_shift_invariant():
    assert certify(build("tape", dtype=torch.float32, **GROWTH)).passed


def test_growth_set_on_a_loaded_configuration():
    """As transformers sets options that are given to from_pretrained."""
    model, tokens = build("rope", max_position_embeddings=8), draw_tokens(1, 12)
    model.config.query_growth = 0.7
    expected = build("rope", max_position_embeddings=8, query_growth=0.7)
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, expected(tokens).logits)


def test_layers_with_a_window_keep_their_queries():
    plain, grown = (build("rope", sliding_window=4, **more) for more in ({}, GROWTH))
    tokens = draw_tokens(2, 12)
    with torch.no_grad():
        assert torch.equal(plain(tokens).logits, grown(tokens).logits)


def test_nothing_changes_up_to_the_start_and_gradients_flow():
    plain, grown = (build("rope", num_hidden_layers=1, **more) for more in ({}, GROWTH))
    tokens = draw_tokens(2, 5)
    torch.testing.assert_close(grown(tokens).logits, plain(tokens).logits)
    tokens = draw_tokens(2, 12)
    compiled = torch.compile(grown, backend="eager", fullgraph=True)
    for model in (grown, compiled):
        grown.zero_grad()
        loss = model(tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        gradient = grown.model.layers[0].self_attn.q_proj.weight.grad.clone()
        if model is grown:
            expected = loss.detach(), gradient
    torch.testing.assert_close((loss.detach(), gradient), expected)


def test_half_precision_counts_exactly():
    """Ids above 256 are not bfloat16 numbers."""
    config = tiny_config("rope", query_growth=0.1, query_growth_start=8)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = config.grow_queries(Positions(ids=torch.tensor([[7, 8, 1002]]))).query_factor
    finally:
        torch.set_default_dtype(default)
    expected = torch.tensor([[1, 1 + 0.1 * math.log(9 / 8), 1 + 0.1 * math.log(1003 / 8)]])
    torch.testing.assert_close(found, expected)


def test_saved_with_the_model(tmp_path):
    model = build("rope", query_growth=0.2)
    assert model.config.query_growth_start == 64
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).config
    assert (loaded.query_growth, loaded.query_growth_start) == (0.2, 64)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"query_growth": -1.0}, "query_growth is -1.0; it must be 0 or more"),
        ({"query_growth": 0.1, "query_growth_start": 0}, "query_growth_start is 0; it must be 1 or more"),
        ({"query_growth": 0.1, "query_growth_start": 10**30}, "it must be at most 2,147,483,647"),
    ],
)
def test_refusals(wrong, message):
    with pytest.raises(ValueError, match=message):
        tiny_config("rope", **wrong)
