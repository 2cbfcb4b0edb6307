"""What serving needs no vLLM for: refusals, the entry point, and running sums read back by attention."""

import re
import tomllib
import warnings
from pathlib import Path

import pytest
import torch

import equitape.serving
from cases import CASES, tiny_config
from equitape import EquitapeConfig
from equitape.encodings import build_encoding
from equitape.nn.backends import equal_parts
from equitape.serving.checks import check_served
from equitape.serving.sums import STEEPNESS, Sums, digits, number

REFUSED = {
    "t5": "takes no bias",
    "fire": "takes no bias",
    "cope": "takes no bias",
    "path": "takes no bias",
    "path-gate": "takes no bias",
    "path-learned": "takes no bias",
    "rope-dynamic": "changes its frequencies",
    "randpe-sampled": "new ids are drawn",
    "tape2-carried": "values and keys one width",
}


def check(case, changes=None, **layout):
    config = tiny_config(case, **(changes or {}))
    check_served(config, build_encoding(config.encoding, config.geometry).eval(), **layout)


@pytest.mark.parametrize("case", CASES)
def test_encodings_that_vllm_cannot_serve_are_refused(case):
    if case not in REFUSED:
        check(case)
        return
    with pytest.raises(ValueError, match=f"vLLM cannot serve encoding '{case.split('-')[0]}'.*: .*{REFUSED[case]}"):
        check(case)


@pytest.mark.parametrize(
    ("changes", "layout", "message"),
    [
        ({}, {"tensor_parallel": 3}, r"size 3 does not divide the model's 4 query heads; use one of 1, 2, 4\."),
        (
            {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8},
            {"tensor_parallel": 2},
            "divide the model's 3 key-value heads; use one of 1, 3",
        ),
        ({"num_hidden_layers": 4, "num_loops": 2}, {"pipeline_parallel": 2}, "num_loops 2 .* tensor parallelism"),
        ({"hidden_act": "relu"}, {}, "hidden_act silu, swish, gelu, gelu_pytorch_tanh, not 'relu'; use generate_batch"),
        ({"experts": {"family": "mixtral", "layers": [0]}}, {}, "mixtures of experts .* use generate_batch"),
        ({"norm_offset": 0.5}, {}, "add 0 or 1 to their weights, not norm_offset 0.5"),
        (
            {"num_loops": 3, "sliding_window": 5, "local_encoding": {"kind": "rope"}},
            {},
            "no local_encoding together with num_loops above 1 or a clock",
        ),
    ],
)
def test_layouts_that_do_not_fit_are_refused(changes, layout, message):
    with pytest.raises(ValueError, match=message):
        check("tape", changes, **layout)


def test_every_field_of_a_configuration_is_read_or_refused():
    """A field that vLLM's classes do not know would change answers without a word."""
    fields = {name for name in EquitapeConfig.__annotations__ if name in EquitapeConfig.__dataclass_fields__}
    # how models are made, trained and called, not what they compute
    others = {
        "initializer_range", "use_cache", "pad_token_id", "bos_token_id", "eos_token_id", "attention_dropout",
        "trained_length", "output_position_states",
    }  # fmt: skip
    # properties of the configuration that are made from fields
    others |= {"max_position_embeddings", "num_hidden_layers", "sliding_layers"}
    source = "".join(path.read_text() for path in Path(equitape.serving.__file__).parent.glob("*.py"))
    # methods of the configuration read these
    assert "config.grow_queries(" in source
    assert "config.softmax_scale(" in source
    others |= {"query_growth", "query_growth_start", "query_scale"}
    assert {name for name in fields - others if not re.search(rf"config\.{name}\b", source)} == set()


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "int8_per_token_head", "turboquant_k8v4", "ultraquant_4bit", "bfloat16"])
def test_a_cache_in_another_dtype_is_refused_for_exact_numbers_in_keys_only(dtype):
    check("tape", cache_dtype=dtype)
    for case in ("tape2", "alibi", "rope-clock", "tape-inside"):
        check(case, cache_dtype="auto")
        with pytest.raises(ValueError, match=f"which a cache in '{dtype}' would round; use kv_cache_dtype 'auto'"):
            check(case, cache_dtype=dtype)
    local = {"local_encoding": {"kind": "rope", "decay": "slopes"}, "sliding_window": 5, "sliding_layers": [1]}
    with pytest.raises(ValueError, match="'rope' keeps exact numbers"):
        check("xpos", local, cache_dtype=dtype)


def test_sequences_longer_than_places_of_running_sums_are_refused():
    longest = torch.tensor([128**3 - 1])
    assert number(digits(longest, torch.bfloat16)) == longest
    assert number(digits(longest + 1, torch.bfloat16)) != longest + 1
    check("tape", length=128**3)
    for case in ("fox", "rope-clock", "tape-clock"):
        check(case, length=128**3 - 1)
        with pytest.raises(ValueError, match=r"up to 2,097,151 tokens, not 2,097,152; set max_model_len to 2097151 or"):
            check(case, length=128**3)


def test_more_ranks_than_key_value_heads_are_served():
    check("tape", {"num_attention_heads": 8, "hidden_size": 64}, tensor_parallel=4)


def test_vllm_finds_the_package_as_a_plugin():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    module, name = project["entry-points"]["vllm.general_plugins"]["equitape"].split(":")
    assert (module, getattr(equitape.serving, name)) == ("equitape.serving", equitape.serving.register)
    assert equitape.serving.TESTED_VLLM in project["optional-dependencies"]["vllm"][0]


def test_other_releases_of_vllm_give_a_warning_that_names_the_tested_one():
    with pytest.warns(UserWarning, match=r"tested with vLLM 0\.32\.x; this is 0\.40\.1"):
        equitape.serving.warn_of_untested("0.40.1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        equitape.serving.warn_of_untested("0.32.0")


def test_values_are_split_in_parts_of_the_width_of_keys():
    value = torch.arange(10.0).reshape(1, 10)
    parts = equal_parts(value, 4)
    assert [part.shape for part in parts] == [(1, 4)] * 3
    assert torch.equal(torch.cat(parts, dim=-1)[:, :10], value)
    assert not torch.cat(parts, dim=-1)[:, 10:].any()


class OneRequest(torch.nn.Module):
    """A cache of one request, which every call overwrites from `start` on: what a paged attention layer does."""

    def __init__(self, heads, groups, width):
        super().__init__()
        self.shape, self.start = (heads, groups, width), 0
        self.keys = self.values = torch.empty(0, groups, width)

    def forward(self, query, key, value):
        heads, groups, width = self.shape
        key, value = key.unflatten(-1, (groups, width)), value.unflatten(-1, (groups, width))
        self.keys = torch.cat((self.keys[: self.start].to(key), key))
        self.values = torch.cat((self.values[: self.start].to(value), value))
        keys, values = (x.repeat_interleave(heads // groups, 1).float() for x in (self.keys, self.values))
        scores = torch.einsum("nhw,khw->hnk", query.unflatten(-1, (heads, width)).float(), keys) * STEEPNESS
        seen = torch.arange(len(keys)) <= torch.arange(len(key))[:, None] + self.start
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return torch.einsum("hnk,khw->nhw", weights, values).to(query.dtype).flatten(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_attention_reads_the_last_cached_sums_exactly(dtype):
    heads, groups, width, columns = 4, 2, 16, 8
    layer = OneRequest(heads, groups, width)
    sums = Sums(layer, heads, groups, width, columns)
    written = torch.randn(23, groups, columns).to(dtype)
    begin = 0
    for end in (5, 6, 18, 23):
        ids = torch.arange(begin, end)
        layer.start = begin
        found, first = sums.read(ids, dtype)
        expected = written[begin - 1] if begin else torch.zeros(groups, columns, dtype=dtype)
        assert torch.equal(found, expected.expand(end - begin, -1, -1))
        assert first.tolist() == [begin] * (end - begin)
        assert torch.equal(sums.write(ids, written[begin:end]), written[begin:end])
        begin = end


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_positions_are_exact_up_to_two_millions(dtype):
    ids = torch.tensor([0, 1, 127, 128, 16383, 16384, 1_000_003, 128**3 - 1])
    assert torch.equal(number(digits(ids, dtype)), ids)
