"""One by one, in chunks and at once: the same logits, with every cache, or a refusal that says why."""

import pytest
import torch
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer

from cases import CACHEABLE, build, draw_tokens, gap


def in_chunks(model, tokens, sizes, cache, mask=None, ids=None):
    """Feed tokens in chunks through a cache and join the logits."""
    parts, start = [], 0
    with torch.no_grad():
        for size in sizes:
            stop = start + size
            parts.append(
                model(
                    tokens[:, start:stop],
                    attention_mask=None if mask is None else mask[:, :stop],
                    position_ids=None if ids is None else ids[:, start:stop],
                    past_key_values=cache,
                    use_cache=True,
                ).logits
            )
            start = stop
    return torch.cat(parts, dim=1)


def full(model, tokens, **inputs):
    with torch.no_grad():
        return model(tokens, use_cache=False, **inputs).logits


PATHS = [
    *((case, implementation, sizes) for case in CACHEABLE for implementation in ("eager", "sdpa") for sizes in (
        (1,) * 8, (6, 5, 3), (10, 1, 1, 1, 1))),
    # every length compiles another FlexAttention mask
    *((case, "flex_attention", (12, 2)) for case in ("rope", "alibi", "t5", "fire", "tape")),
]  # fmt: skip


@pytest.mark.parametrize(("case", "implementation", "sizes"), PATHS)
def test_cached_equals_full(case, implementation, sizes):
    model = build(case)
    tokens = draw_tokens(2, sum(sizes))
    expected = full(model, tokens)
    model.set_attn_implementation(implementation)
    assert gap(in_chunks(model, tokens, sizes, DynamicCache(config=model.config)), expected) < 1e-10


@pytest.mark.parametrize("case", CACHEABLE)
@pytest.mark.parametrize("side", ["left", "right"])
def test_cached_equals_full_with_padding(case, side):
    model = build(case)
    tokens = draw_tokens(2, 14)
    mask = torch.ones_like(tokens)
    # on the right the padding of the first chunk stays in the cache, and the second goes on after it
    if side == "left":
        mask[1, :4] = 0
    else:
        mask[1, 5:8] = 0
    expected = full(model, tokens, attention_mask=mask)
    # the last begins a chunk with padding that comes after cached tokens
    for sizes in ((8, 1, 1, 4), (3, 5, 6), (6, 8)):
        found = in_chunks(model, tokens, sizes, DynamicCache(config=model.config), mask)
        assert gap(found[mask.bool()], expected[mask.bool()]) < 1e-10


@pytest.mark.parametrize("case", CACHEABLE)
def test_static_cache_equals_full(case):
    model = build(case)
    tokens = draw_tokens(2, 14)
    mask = torch.ones_like(tokens)
    mask[1, :4] = 0
    cache = StaticCache(config=model.config, max_cache_len=20)
    found = in_chunks(model, tokens, (8, 1, 1, 4), cache, mask)
    assert gap(found[mask.bool()], full(model, tokens, attention_mask=mask)[mask.bool()]) < 1e-10


@pytest.mark.parametrize("case", CACHEABLE)
def test_cache_with_shifted_ids(case):
    model = build(case)
    tokens = draw_tokens(2, 14)
    ids = torch.arange(14)[None] + (30 if case == "learned" else 1000)
    expected = full(model, tokens, position_ids=ids)
    assert gap(in_chunks(model, tokens, (5, 1, 8), DynamicCache(config=model.config), ids=ids), expected) < 1e-9


@pytest.mark.parametrize("case", CACHEABLE)
@pytest.mark.parametrize("layers", [None, [1]])
def test_sliding_window_cache_equals_full(case, layers):
    model = build(case, sliding_window=5, sliding_layers=layers)
    tokens = draw_tokens(2, 14)
    expected = full(model, tokens)
    assert gap(expected, full(build(case), tokens)) > 1e-4
    for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=14)):
        assert gap(in_chunks(model, tokens, (4, 3, 1, 1, 1, 4), cache), expected) < 1e-10


@pytest.mark.parametrize("case", ["tape", "rope", "alibi"])
def test_looped_depth_has_a_cache_for_every_application(case):
    model = build(case, num_hidden_layers=4, num_loops=2)
    assert len(model.model.layers) == 2
    tokens = draw_tokens(2, 10)
    cache = DynamicCache(config=model.config)
    assert gap(in_chunks(model, tokens, (6, 1, 3), cache), full(model, tokens)) < 1e-10
    assert len(cache.layers) == 4


@pytest.mark.parametrize("case", ["rope-dynamic", "randpe-sampled"])
def test_refusal_says_why_and_what_to_do(case):
    model = build(case)
    tokens = draw_tokens(1, 6)
    with pytest.raises(ValueError, match=r"cannot use a cache: .+ use_cache=False"):
        model(tokens, past_key_values=DynamicCache(config=model.config))
    # nothing is cached behind the caller's back either
    assert model(tokens, use_cache=True).past_key_values is None
    assert model.generate(tokens, max_new_tokens=3, use_cache=False, do_sample=False).shape == (1, 9)


COUNT_BACK = ["alibi", "xpos", "t5", "fire", "rope-learned", "path-learned", "tape2", "tape2-decaying", "tape2-carried",
              "tape2-values", "tape2-full"]  # fmt: skip


@pytest.mark.parametrize("case", CACHEABLE)
def test_cached_ids_with_gaps_are_exact_or_refused(case):
    model, tokens = build(case), draw_tokens(2, 9)
    ids = torch.tensor([[3, 4, 5, 6, 10, 11, 12, 13, 14]])
    expected = full(model, tokens, position_ids=ids)
    cache = DynamicCache(config=model.config)
    if case not in COUNT_BACK:
        assert gap(in_chunks(model, tokens, (6, 1, 2), cache, ids=ids), expected) < 1e-10
        return
    # also where a prepared mask shows the padding: generate makes one for a static cache
    prepared = torch.ones(9, 9, dtype=torch.bool).tril()[None, None].expand(2, 1, -1, -1)
    static = {"cache_implementation": "static", "disable_compile": True, "max_new_tokens": 1, "position_ids": ids}
    for call in (
        lambda: model(tokens, position_ids=ids, past_key_values=cache),
        lambda: model(tokens, position_ids=ids, past_key_values=cache, attention_mask=prepared),
        lambda: model.generate(tokens, attention_mask=torch.ones_like(tokens), **static),
    ):
        with pytest.raises(ValueError, match="position_ids are not consecutive"):
            call()
    # nothing is cached behind the caller's back either
    with pytest.warns(UserWarning, match="makes no cache"):
        found = model(tokens, position_ids=ids, use_cache=True)
    assert found.past_key_values is None
    assert gap(found.logits, expected) < 1e-10
    with pytest.warns(UserWarning, match="makes no cache"):
        assert model(tokens, position_ids=ids, attention_mask=prepared, use_cache=True).past_key_values is None
    assert model(tokens, position_ids=ids - 3, attention_mask=prepared).past_key_values is None
    shifted = torch.arange(9)[None] + 3
    assert model(tokens, position_ids=shifted, attention_mask=prepared, use_cache=True).past_key_values is not None
    jumps = torch.tensor([[3, 0, 0, 0, 3, 0, 0, 0, 0]])
    with pytest.warns(UserWarning, match="makes no cache"):
        assert model(tokens, position_jumps=jumps, use_cache=True).past_key_values is None
    # padding leaves no gap
    mask = torch.tensor([[1] * 6 + [0] * 3] * 2)
    counted = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
    assert model(tokens, attention_mask=mask, position_ids=counted, use_cache=True).past_key_values is not None


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("case", COUNT_BACK)
def test_calls_that_cannot_be_continued_say_nothing(case):
    """Packed rows, and training with jumps: nobody expects a cache of them."""
    model, tokens = build(case), draw_tokens(2, 9)
    segments = torch.tensor([[0] * 4 + [1] * 5] * 2)
    ids, jumps = torch.arange(9)[None], torch.ones(2, 9, dtype=torch.long)
    for more in ({}, {"position_ids": ids}, {"position_jumps": jumps}):
        assert model(tokens, segment_ids=segments, use_cache=True, **more).past_key_values is None
    model.train()
    assert model(tokens, position_jumps=jumps, use_cache=True).past_key_values is None
    assert model(tokens, use_cache=True).past_key_values is not None


ROUNDABLE = ["nope", "learned", "sinusoidal", "rope", "rope-yarn", "rope-values", "xpos", "randpe", "t5", "fire", "cope",
             "tape", "tape-options", "tape-fourier", *(case for case in CACHEABLE if "tensor" in case)]  # fmt: skip


class QuantizedLayer(DynamicLayer):
    """Rounds keys and values to 8 bits, on a scale for every head of a token."""

    def update(self, key_states, value_states, *args, **kwargs):
        return tuple(map(self.rounded, super().update(key_states, value_states, *args, **kwargs)))

    @staticmethod
    def rounded(x):
        low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        step = (high - low).clamp(min=1e-9) / 255
        return ((x - low) / step).round() * step + low


@pytest.mark.parametrize("case", CACHEABLE)
def test_quantised_caches_are_nearly_exact_or_refused(case):
    """A decay or a clock keeps positions among the numbers of a key, which set the scale of all others."""
    model, tokens = build(case), draw_tokens(2, 20)
    cache = DynamicCache()
    cache.layers = [QuantizedLayer() for _ in range(3)]
    if case not in ROUNDABLE:
        with pytest.raises(ValueError, match="use a dynamic"):
            model(tokens, past_key_values=cache)
        return
    expected = full(model, tokens)
    assert (in_chunks(model, tokens, (12, 8), cache) - expected).norm() < 0.03 * expected.norm()


@pytest.mark.parametrize(
    ("case", "options", "more"),
    [
        (
            "xpos",
            None,
            {"local_encoding": {"kind": "rope", "decay": "slopes"}, "sliding_window": 6, "sliding_layers": [1]},
        ),
        ("path", {"convolution": 1}, {}),
    ],
)
def test_quantised_caches_are_refused_for_any_layer(case, options, more):
    model = build(case, options, **more)
    cache = DynamicCache()
    cache.layers = [QuantizedLayer() for _ in range(3)]
    with pytest.raises(ValueError, match="use a dynamic"):
        model(draw_tokens(2, 9), past_key_values=cache)


@pytest.mark.parametrize("case", CACHEABLE)
def test_config_has_the_width_of_the_cache(case):
    model = build(case)
    cache = DynamicCache(config=model.config)
    model(draw_tokens(1, 5), past_key_values=cache)
    assert [layer.values.shape[-1] for layer in cache.layers] == model.config.value_cache_dims
