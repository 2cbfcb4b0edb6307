"""equitape plan: layouts, tables, and what is refused."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from cases import tiny_config
from command_line import call, in_one_line
from equitape import EquitapeForCausalLM
from equitape.scale import plan
from equitape.scale.costs import ModelCosts, pairs
from equitape.scale.layouts import Layout, best_training, layouts, plan_serving, plan_training
from equitape.scale.machines import GPUS
from equitape.scale.planning import NAMED

H200 = GPUS["h200"]


def costs_of(name, encoding="tape", length=131072):
    return ModelCosts(NAMED[name].config(encoding, "sdpa", length))


def run(*words, code=0):
    return call("plan", *words, code=code)


def message(result):
    return in_one_line(result.output)


def test_a_split_row_takes_less_memory_and_the_same_work():
    costs = costs_of("1.1b")
    alone, shared = (
        plan_training(costs, H200, Layout(gpus=8, context_parallel=parts, sharded=True, checkpointing=True), 1, 131072)
        for parts in (1, 8)
    )
    assert shared.memory.activations == alone.memory.activations / 8
    assert shared.memory.weights == alone.memory.weights
    assert 8 * shared.operations == alone.operations
    assert (alone.tokens, shared.tokens) == (8 * 131072, 131072)
    # keys and values of an eighth of the row visit seven GPUs: forward, recomputed and backward
    visits = 3 * 7 * (131072 // 8) * costs.cache(2)
    # their gradients, in float32, visit all eight
    assert shared.ring_bytes == visits + 8 * (131072 // 8) * costs.cache(4)
    assert shared.memory.gathered - alone.memory.gathered == 131072 * 2 * 3 * costs.groups * costs.head_dim
    assert alone.ring_bytes == 0


def test_the_ring_computes_scores_for_every_part_of_a_wide_value():
    costs = costs_of("155m")
    whole, split = (costs.attention(1, 1024, ring=ring) for ring in (False, True))
    scores = 2 * pairs(1024) * costs.heads * 64 * 11
    assert (split[0] - whole[0], split[1] - whole[1]) == (scores, 3 * scores)


def test_the_cache_of_tape_is_wider_where_it_carries():
    rope, tape = costs_of("155m", "rope"), costs_of("155m")
    assert rope.cache(2) == 36864
    assert tape.cache(2) == 36864 + 11 * 12 * 64 * 2


def test_a_window_keeps_its_tokens_and_a_token_reads_its_experts():
    config = tiny_config("rope", sliding_window=100, sliding_layers=[0, 2])
    costs, ids = ModelCosts(config), torch.zeros(1, 300, dtype=torch.long)
    layers = EquitapeForCausalLM(config)(ids, use_cache=True).past_key_values.layers
    # transformers drops one token more, before the next comes
    held = sum(each.keys.nbytes + each.values.nbytes for each in layers) + 2 * costs.cache(4) // 3
    assert plan_serving(costs, H200, 300).cache == held / 2
    experts = {"family": "mixtral", "layers": [0, 2], "intermediate_size": 48, "num_local_experts": 4}
    config = tiny_config("rope", experts={**experts, "num_experts_per_tok": 1})
    costs, model = ModelCosts(config), EquitapeForCausalLM(config)
    unused = sum(each.numel() for name, each in model.named_parameters() if ".experts." in name) * 3 // 4
    serving = plan_serving(costs, H200, 300)
    assert serving.weights == 2 * model.num_parameters()
    assert serving.token_bytes == serving.weights - 2 * unused + serving.cache


def test_the_best_layout_fits_and_no_shorter_ring_is_nearly_as_fast():
    costs = costs_of("1.1b", length=1 << 20)
    best = best_training(costs, H200, 16, 1, 1 << 20)
    assert best.fits
    assert best.layout.context_parallel > 1
    others = [plan_training(costs, H200, layout, 1, 1 << 20) for layout in layouts(16, 1 << 20)]
    most = max(each.tokens_per_second for each in others if each.fits)
    assert best.tokens_per_second >= 0.9 * most
    shorter = [each for each in others if each.fits and each.layout.context_parallel < best.layout.context_parallel]
    assert all(each.tokens_per_second < 0.9 * most for each in shorter)
    assert not all(each.fits for each in others)


def test_nothing_is_sharded_where_everything_fits():
    small, large = (best_training(costs_of(name), H200, 8, 1, 4096).layout for name in ("155m", "7b"))
    assert (small.context_parallel, small.sharded) == (1, False)
    assert large.sharded


def test_a_row_that_cannot_be_split_stays_whole():
    assert {layout.context_parallel for layout in layouts(8, 100)} == {1, 2}


def test_one_plan_per_encoding():
    rope, tape = plan("7b", 131072, gpus=8)
    assert (rope.encoding, tape.encoding) == ("rope", "tape")
    assert tape.parameters > rope.parameters > 7e9
    assert tape.training.fits
    assert rope.training.fits
    assert tape.training.tokens_per_second < rope.training.tokens_per_second
    assert tape.serving.cache == 131072 * (32 * 2 * 8 * 128 + 31 * 8 * 128) * 2
    (given,) = plan("7b", 131072, gpus=8, encodings=["alibi"], context_parallel=4, checkpointing=False)
    assert given.training.layout == Layout(gpus=8, context_parallel=4, sharded=True, checkpointing=False)


def test_encodings_with_options():
    names = ("tape", "tape layers=[0] mixer_size=8")
    whole, one = json.loads(
        run("155m", "--length", 1024, "--json", *(word for name in names for word in ("--encoding", name))).output
    )
    assert (whole["encoding"], one["encoding"]) == names
    assert one["serving"]["cache"] == costs_of("155m", {"kind": "tape", "layers": [0]}).cache(2) * 1024
    assert one["serving"]["cache"] < whole["serving"]["cache"]
    assert "layers=[0]" in run("155m", "--length", 1024, "--encoding", names[1]).output


def test_the_command_prints_the_same_as_the_library():
    result = run("smollm2-135m", "--length", 8192, "--gpus", 1, "--json")
    plans = json.loads(result.output)
    assert plans == json.loads(json.dumps([each.to_dict() for each in plan("smollm2-135m", 8192, gpus=1)]))
    table = run("smollm2-135m", "--length", 8192, "--gpus", 1).output
    assert "smollm2-135m, 8,192 tokens, 1 H200" in table
    assert "peak per GPU" in table


def test_a_folder_is_planned_with_its_encoding(tmp_path):
    EquitapeForCausalLM(tiny_config("tape2")).save_pretrained(tmp_path)
    (found,) = plan(tmp_path, 64, gpus=1)
    assert found.encoding == "tape2"
    assert found.parameters == EquitapeForCausalLM(tiny_config("tape2")).num_parameters()


def test_too_little_memory_is_an_exit_code():
    result = run("405b", "--length", 131072, "--gpus", 8, code=1)
    assert "(too much)" in message(result)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("tiny",), "Missing option '--length'"),
        (("8b", "--length", 100), "There is no size or model '8b'"),
        (("tiny", "--length", 100, "--gpus", 6, "--context-parallel", 4), "6 GPUs cannot form groups of 4"),
        (("tiny", "--length", 100, "--context-parallel", 8), "A row of 100 tokens cannot be split over 8 GPUs"),
        (("tiny", "--length", 100, "--encoding", "t5"), "Encoding 't5' adds a bias to every score"),
        (("tiny", "--length", 100, "--encoding", "tape layer=[0]"), "no option 'layer'. Did you mean 'layers'"),
        (("tiny", "--length", 100, "--gpu", "h300"), "h300"),
    ],
    ids=["no length", "model", "groups", "length", "bias", "option", "gpu"],
)
def test_bad_input_is_refused_in_one_sentence(arguments, words):
    result = run(*arguments, code=2)
    assert words in message(result)


def test_the_page_has_the_tables_of_the_formulas():
    path = Path(__file__).parent.parent.parent / "docs/tables.py"
    spec = importlib.util.spec_from_file_location("docs_tables", path)
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    text = tables.SCALE.read_text()
    assert tables.scale_page(text) == text, "rewrite it: python docs/tables.py"
