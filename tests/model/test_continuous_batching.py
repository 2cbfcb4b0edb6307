"""generate_batch: many requests at once from a paged cache, with the tokens of `generate`."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from batching import draw_prompts, one_by_one, serve
from cases import DECODED, build, draw_tokens
from equitape.model.paged import PagedCache, row_width


@pytest.mark.parametrize("case", DECODED)
def test_tokens_are_those_of_generate(case):
    model = build(case, dtype=torch.float32)
    prompts = draw_prompts()
    assert serve(model, prompts) == one_by_one(model, prompts)


@pytest.mark.parametrize(
    "shape",
    [
        {"num_loops": 2, "num_hidden_layers": 4},
        {"sliding_window": 5, "sliding_layers": [1]},
        {"sliding_window": 5},
        {"query_growth": 0.7, "query_growth_start": 4, "sliding_window": 5, "sliding_layers": [1]},
        {"qk_norm": True, "attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 4},
        {"qk_norm": True, "qk_norm_joint": True, "norms": "after", "unrotated_layers": [1], "query_scale": 0.2},
    ],
    ids=lambda shape: "-".join(shape),
)
@pytest.mark.parametrize("case", ["tape2-full", "tape-clock", "t5"])
def test_other_shapes(case, shape):
    model = build(case, dtype=torch.float32, **shape)
    prompts = draw_prompts()
    assert serve(model, prompts) == one_by_one(model, prompts)


def test_eager_attention_and_shared_prefixes():
    """Prompts that start alike share the blocks of their start."""
    model = build("tape2-full", dtype=torch.float32)
    model.set_attn_implementation("eager")
    start = draw_tokens(1, 16)[0].tolist()
    prompts = [[*start, *prompt] for prompt in draw_prompts()]
    assert serve(model, prompts, max_batch_tokens=40) == one_by_one(model, prompts)
    assert model.config._attn_implementation == "eager"


def test_without_the_state_tokens_differ():
    """The tokens depend on what the cache carries: without it, the same weights give others."""
    model, prompts = build("tape", dtype=torch.float32), draw_prompts()
    expected = serve(model, prompts)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("encoding.carry"):
                parameter.zero_()
    assert serve(model, prompts) != expected


def test_the_cache_stores_nothing_twice():
    """Rows of TAPE's cache: three head dimensions in two rows, each padded to a multiple of 8."""
    assert row_width(build("tape", head_dim=8).config) == 16
    assert row_width(build("tape", head_dim=16).config) == 24
    assert row_width(build("rope", head_dim=16).config) == 16
    assert row_width(build("alibi", head_dim=16).config) == 24


def test_refusals():
    message = "Encoding 'rope' cannot use continuous batching .* changes its frequencies"
    with pytest.raises(ValueError, match=message):
        build("rope-dynamic").generate_batch([[5, 6, 7]])
    local = {"sliding_window": 5, "sliding_layers": [1], "local_encoding": {"kind": "rope", "theta": 100.0}}
    for name, shape in {"attention_softcap": {"attention_softcap": 2.0}, "local_encoding": local}.items():
        with pytest.raises(ValueError, match=f"does not support models with {name}; use generate or vLLM"):
            build("tape", **shape).generate_batch([[5, 6, 7]])
    model = build("tape")
    model.set_attn_implementation("flex_attention")
    with pytest.raises(ValueError, match="needs attention 'sdpa' or 'eager', not 'flex_attention'"):
        model.generate_batch([[5, 6, 7]])


def test_paged_implementations_are_refused():
    for name in ("paged|eager", "paged|sdpa"):
        with pytest.raises(ValueError, match=r"'paged.* does not support encoding 'rope'"):
            build("rope").set_attn_implementation(name)


def test_the_kernel_reads_the_cache_in_place(monkeypatch):
    """Triton's interpreter runs it on the CPU; its cases are in tests/kernels."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("compiled kernels run in tests/gpu")
    sizes = {"hidden_size": 64, "sliding_window": 5, "sliding_layers": [1]}
    model, prompts = build("tape-clock", dtype=torch.float32, **sizes), draw_prompts()[:2]
    expected = one_by_one(model, prompts)
    monkeypatch.setenv("EQUITAPE_KERNELS", "triton")
    assert serve(model, prompts) == expected


class CacheInGroups:
    """A cache in which every layer is a group, with rows of its own in storage that all share, as transformers 5.17
    makes it where one layer of three slides.
    """

    dtype = torch.float32

    def __init__(self, layers, rows, num_heads, width):
        self.layer_index_to_group_indices = {layer: (layer, 0) for layer in range(layers)}
        self.key_cache, self.value_cache = ([torch.zeros(rows, num_heads, width)] for _ in range(2))

    def update(self, key, value, layer, read_index, write_index):
        for storage, new in ((self.key_cache, key), (self.value_cache, value)):
            storage[0][write_index[layer]] = new[0].transpose(0, 1)
        return key[0].transpose(0, 1), value[0].transpose(0, 1)


def test_layers_of_one_type_in_several_groups(monkeypatch):
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("compiled kernels run in tests/gpu")
    monkeypatch.setenv("EQUITAPE_KERNELS", "triton")
    model = build("rope", dtype=torch.float32, num_hidden_layers=2, hidden_size=64, num_key_value_heads=4)
    cache = CacheInGroups(layers=2, rows=20, num_heads=4, width=16)
    ends = torch.tensor([0, 2, 5])
    requests = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_seqlen_q": 3, "max_seqlen_k": 3}
    rows = torch.randperm(20)
    nothing = [torch.empty(0, dtype=torch.int64)] * 2
    paged = PagedCache(cache, {**requests, "read_index": nothing, "write_index": [rows[:5], rows[5:10]]}, model.config)
    mask = paged.masks(model.model.encoding, torch.tensor([[0, 1, 0, 1, 2]]), torch.float32, 0.25)["full_attention"]
    for layer in range(2):
        query, key, value = torch.randn(3, 1, 4, 5, 16)
        output = mask.attend(None, query, *paged.update(key, value, layer))
        for some in (slice(0, 2), slice(2, 5)):
            own = (tensor[:, :, some] for tensor in (query, key, value))
            expected = scaled_dot_product_attention(*own, is_causal=True, scale=0.25)
            assert torch.allclose(output[:, some], expected.transpose(1, 2), atol=1e-5)
