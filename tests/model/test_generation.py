"""generate: greedy, sampled and with beams, with every cache, padded, and from embeddings."""

import pytest
import torch

from cases import DECODED, build, draw_tokens

NEW = 6


def generate(model, tokens, mask=None, **settings):
    mask = torch.ones_like(tokens) if mask is None else mask
    return model.generate(
        tokens, attention_mask=mask, max_new_tokens=NEW, min_new_tokens=NEW, pad_token_id=0,
        **{"do_sample": False, **settings},
    )  # fmt: skip


def slowly(model, tokens):
    """Greedy decoding without a cache."""
    for _ in range(NEW):
        with torch.no_grad():
            logits = model(tokens, use_cache=False).logits[:, -1]
        logits[:, model.generation_config.eos_token_id] = -torch.inf
        tokens = torch.cat((tokens, logits.argmax(-1, keepdim=True)), dim=1)
    return tokens


@pytest.mark.parametrize("case", DECODED)
def test_greedy(case):
    model = build(case)
    tokens = draw_tokens(2, 7)
    expected = slowly(model, tokens)
    assert torch.equal(generate(model, tokens), expected)
    static = {"cache_implementation": "static", "disable_compile": True}
    assert torch.equal(generate(model, tokens, **static), expected)
    # transformers makes the static cache of a prompt in chunks beforehand
    assert torch.equal(generate(model, tokens, prefill_chunk_size=3, **static), expected)


@pytest.mark.parametrize("case", ["rope", "alibi", "tape", "tape2"])
def test_static_caches_of_prompts_in_chunks_are_made_before_they_are_compiled(case):
    """Inside compiled code, transformers could not tell CUDA graphs that the tensors stay where they are."""
    model = build(case)
    cache = model._prepare_static_cache("static", 2, 12, 3, {})
    assert all(layer.is_initialized for layer in cache.layers)
    assert [layer.keys.shape[-1] for layer in cache.layers] == model.config.key_cache_dims
    assert [layer.values.shape[-1] for layer in cache.layers] == model.config.value_cache_dims
    assert not any(layer.is_initialized for layer in model._prepare_static_cache("static", 2, 12, None, {}).layers)


@pytest.mark.parametrize("case", DECODED)
def test_left_padding(case):
    model = build(case)
    short, long = draw_tokens(1, 4), draw_tokens(1, 9, seed=1)
    batch = torch.cat((torch.nn.functional.pad(short, (5, 0)), long))
    mask = torch.ones_like(batch)
    mask[0, :5] = 0
    expected = torch.cat((slowly(model, short)[:, 4:], slowly(model, long)[:, 9:]))
    for settings in ({}, {"cache_implementation": "static", "disable_compile": True}):
        assert torch.equal(generate(model, batch, mask, **settings)[:, 9:], expected)


@pytest.mark.parametrize("case", ["rope", "nope", "alibi", "t5", "fire", "xpos", "tape", "tape2"])
def test_static_caches_of_layers_with_a_window(case):
    """Their masks hide old keys from the last token, which other layers and other tokens see. Queries grow as well."""
    model = build(case, query_growth=0.5, query_growth_start=4, sliding_window=4, sliding_layers=[0])
    tokens = torch.nn.functional.pad(draw_tokens(2, 8), (5, 0))
    mask = (tokens > 0).long()
    mask[1, 5:8] = 0
    shown = {"output_logits": True, "return_dict_in_generate": True}
    expected = torch.stack(generate(model, tokens, mask, **shown).logits)
    static = {"cache_implementation": "static", "disable_compile": True, **shown}
    for chunks in (None, 3):
        found = generate(model, tokens, mask, prefill_chunk_size=chunks, **static)
        torch.testing.assert_close(torch.stack(found.logits), expected)


@pytest.mark.parametrize("case", ["t5", "fire"])
def test_biases_of_prompts_in_chunks_with_windows_in_all_layers(case):
    model, tokens = build(case, sliding_window=4), draw_tokens(1, 12)
    static = {"cache_implementation": "static", "disable_compile": True}
    assert torch.equal(generate(model, tokens, prefill_chunk_size=3, **static), slowly(model, tokens))


@pytest.mark.parametrize("case", ["tape", "tape-options", "rope", "alibi", "tape2", "fox", "rope-clock"])
def test_beams_agree_over_caches(case):
    model = build(case)
    tokens = draw_tokens(2, 6)
    expected = generate(model, tokens, num_beams=3, use_cache=False)
    # offloading moves layers between an accelerator and the CPU
    for cache in ("dynamic", "static", *["offloaded"] * torch.cuda.is_available()):
        found = generate(model, tokens, num_beams=3, cache_implementation=cache, disable_compile=True)
        assert torch.equal(found, expected), cache


@pytest.mark.parametrize("case", ["tape", "t5"])
def test_sampling_is_reproducible_and_random(case):
    model = build(case)
    tokens = draw_tokens(2, 6)
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(generate(model, tokens, do_sample=True, top_k=0))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_from_embeddings():
    model = build("tape")
    tokens = draw_tokens(2, 7)
    embeddings = model.get_input_embeddings()(tokens)
    found = model.generate(
        inputs_embeds=embeddings, attention_mask=torch.ones_like(tokens), max_new_tokens=NEW, min_new_tokens=NEW,
        do_sample=False,
    )  # fmt: skip
    assert torch.equal(found, generate(model, tokens)[:, 7:])


def test_quantized_cache_where_its_package_is_installed():
    pytest.importorskip("optimum.quanto", reason="transformers' quantized caches need optimum-quanto")
    model = build("tape", dtype=torch.float32)
    tokens = draw_tokens(1, 8)
    found = generate(model, tokens, cache_implementation="quantized")
    # four bits round the cache, so only what the prompt alone decides must agree
    assert torch.equal(found[:, :9], generate(model, tokens)[:, :9])
    assert found.shape == (1, 8 + NEW)


def test_compiled_static_decoding_does_not_recompile():
    """One graph for all steps: the length of the cache is data, not shape."""
    model = build("tape", dtype=torch.float32)
    tokens = draw_tokens(1, 5)
    from transformers import StaticCache

    torch._dynamo.reset()
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph

    step = torch.compile(model, fullgraph=True, backend=count)
    cache = StaticCache(config=model.config, max_cache_len=16)
    with torch.no_grad():
        logits = model(tokens, past_key_values=cache).logits
        for position in range(5, 12):
            token = logits[:, -1:].argmax(-1)
            mask = (torch.arange(16) <= position)[None, None, None]
            logits = step(
                token, attention_mask=mask, position_ids=torch.tensor([[position]]), past_key_values=cache
            ).logits
    assert len(graphs) == 1
