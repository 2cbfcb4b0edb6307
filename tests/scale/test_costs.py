"""The formulas against what torch counts on small models, and against peaks and times measured on an H200."""

import csv
from pathlib import Path

import pytest
import torch
from functorch.compile import min_cut_rematerialization_partition, nop
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch.utils.flop_counter import FlopCounterMode

from cases import CASES, tiny_config
from equitape import EquitapeConfig, EquitapeForCausalLM
from equitape.bench.shapes import SHAPES
from equitape.encodings import ENCODINGS
from equitape.scale.costs import ModelCosts, pairs
from equitape.scale.layouts import Layout, plan_training, training_memory
from equitape.scale.machines import GPUS

RESULTS = Path(__file__).parent.parent.parent / "benchmarks/results"
ROWS, LENGTH = 2, 24
CLOCK = {"clock": True, "decay": "slopes", "decay_inside": True}
"""With its columns inside heads, for which attention on the CPU has a fused kernel."""
SIZES = {
    "vocab_size": 301,
    "hidden_size": 96,
    "intermediate_size": 176,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "bos_token_id": None,
    "eos_token_id": None,
}


def model_of(encoding, dtype=torch.float32, **changes):
    config = EquitapeConfig(**{**SIZES, **changes}, encoding=encoding, attn_implementation="sdpa")
    return EquitapeForCausalLM(config).to(dtype).train()


@pytest.mark.parametrize("case", CASES)
def test_parameters_are_those_of_the_model(case):
    config = tiny_config(case)
    assert ModelCosts(config).parameters == EquitapeForCausalLM(config).num_parameters()


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": True},
        {"num_loops": 3},
        {"attention_bias": True, "mlp_bias": True, "qk_norm": True},
    ],
    ids=["tied", "looped", "biases"],
)
def test_parameters_of_other_shapes(changes):
    model = model_of("tape", **changes)
    assert ModelCosts(model.config).parameters == model.num_parameters()


def counted(case, **changes):
    """Operations of a forward pass by torch's counter, with unfused attention."""
    config = tiny_config(case, **changes)
    config._attn_implementation = "eager"
    model, ids = EquitapeForCausalLM(config), torch.zeros(ROWS, LENGTH, dtype=torch.long)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=ids, use_cache=False)
    return config, counter.get_total_flops()


@pytest.mark.parametrize(
    "case", [case for case in CASES if not ENCODINGS[case.split("-")[0]].adds_bias and "tensor" not in case]
)
def test_operations_are_what_torch_counts(case):
    config, operations = counted(case)
    assert ModelCosts(config).forward(ROWS, LENGTH, causal=False).total == pytest.approx(operations, rel=0.02)
    if case in ("nope", "rope", "tape", "tape-fourier", "tape-options"):
        assert ModelCosts(config).forward(ROWS, LENGTH, causal=False).total == operations


def test_a_token_passes_some_experts_and_local_layers_carry_nothing():
    experts = {"family": "mixtral", "layers": [0, 2], "intermediate_size": 48, "num_local_experts": 4}
    config, operations = counted("tape", experts={**experts, "num_experts_per_tok": 2})
    assert ModelCosts(config).forward(ROWS, LENGTH, causal=False).total == operations
    local = tiny_config("tape", sliding_window=5, sliding_layers=[0], local_encoding={"kind": "rope"})
    costs, tape = ModelCosts(local), ModelCosts(tiny_config("tape"))
    assert costs.parameters == EquitapeForCausalLM(local).num_parameters()
    assert tape.cache(2) - costs.cache(2) == 2 * local.num_key_value_heads * local.head_dim


def test_operations_of_loops_and_windows():
    config, operations = counted("tape", num_hidden_layers=6, num_loops=2)
    assert ModelCosts(config).forward(ROWS, LENGTH, causal=False).total == operations
    narrow = tiny_config("rope", sliding_window=5)
    seen = torch.ones(LENGTH, LENGTH).tril().triu(-4).sum().item()
    assert pairs(LENGTH, 5) == seen
    assert ModelCosts(narrow).forward(1, LENGTH).attention * pairs(LENGTH) == pytest.approx(
        ModelCosts(tiny_config("rope")).forward(1, LENGTH).attention * seen
    )


def saved_bytes(model, compiled):
    """Bytes per token that autograd keeps, weights aside."""

    def loss_of(ids):
        return model(input_ids=ids, labels=ids, use_cache=False).loss

    if compiled:
        # the graphs that torch.compile makes, run without generated code
        backend = aot_autograd(
            fw_compiler=nop,
            bw_compiler=nop,
            decompositions=select_decomp_table(),
            partition_fn=min_cut_rematerialization_partition,
        )
        loss_of = torch.compile(loss_of, fullgraph=True, dynamic=False, backend=backend)
    ids = torch.randint(model.config.vocab_size, (3, 64))
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss_of(ids)
    torch._dynamo.reset()
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values()) / ids.numel()


@pytest.mark.parametrize(
    ("encoding", "dtype", "changes", "compiled"),
    [
        ("rope", torch.float32, {}, False),
        ("rope", torch.bfloat16, {}, False),
        ("rope", torch.bfloat16, {}, True),
        ("nope", torch.bfloat16, {"num_key_value_heads": 8}, False),
        ("tape", torch.float32, {}, False),
        ("tape", torch.bfloat16, {"num_hidden_layers": 2}, True),
        ("tape", torch.bfloat16, {"num_hidden_layers": 6, "num_loops": 2}, False),
        ({"kind": "rope", "rotate_values": 1.0}, torch.float32, {}, False),
        ({"kind": "tape", "rotate_values": 1.0}, torch.float32, {"num_hidden_layers": 5}, False),
        ({"kind": "tape", "rotate_values": 1.0}, torch.bfloat16, {"num_hidden_layers": 4}, True),
        ({"kind": "tape", "rotate_values": 1.0}, torch.float32, {"num_hidden_layers": 4, "num_loops": 2}, False),
        ({"kind": "tape", "rotate_values": 1.0}, torch.float32, {"unrotated_layers": [1, 2]}, False),
        ({"kind": "tape", "move": True}, torch.float32, {}, False),
        ({"kind": "tape", "move": True, "mlp_update": False}, torch.bfloat16, {"num_hidden_layers": 2}, True),
        ({**CLOCK, "kind": "rope"}, torch.bfloat16, {}, False),
        ({**CLOCK, "kind": "rope"}, torch.bfloat16, {}, True),
        ({**CLOCK, "kind": "tape"}, torch.float32, {}, False),
        ({**CLOCK, "kind": "tape"}, torch.bfloat16, {}, True),
    ],
    ids=[
        "rope",
        "rope-bf16",
        "rope-compiled",
        "nope",
        "tape",
        "tape-compiled",
        "tape-looped",
        "rope-values",
        "tape-values",
        "tape-values-compiled",
        "values-looped",
        "values-unrotated",
        "move",
        "move-compiled",
        "clock",
        "clock-compiled",
        "tape-clock",
        "tape-clock-compiled",
    ],
)
def test_kept_activations_are_what_autograd_saves(encoding, dtype, changes, compiled):
    """Within a few small statistics; TAPE's plain update also keeps the field before mixing, which kernels do not."""
    model = model_of(encoding, dtype, **changes)
    size = dtype.itemsize
    costs = ModelCosts(model.config)
    logits = SIZES["vocab_size"] * (size if compiled else 4)
    expected = costs.kept(size, compiled=compiled, cuda=False) + logits
    found = saved_bytes(model, compiled)
    assert found == pytest.approx(expected, rel=0.005 if encoding in ("rope", "nope") else 0.04)
    assert found >= expected


@pytest.mark.parametrize("encoding", ["tape", {**CLOCK, "kind": "tape"}], ids=["tape", "clock"])
def test_checkpoints_keep_what_enters_a_block(encoding):
    model = model_of(encoding, num_hidden_layers=8)
    whole = saved_bytes(model, False)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    costs, logits = ModelCosts(model.config), 4 * SIZES["vocab_size"]
    found = saved_bytes(model, False)
    assert found < whole / 4
    # the first block gets one field for all rows and heads, and the plain norm keeps float32 tokens
    assert found == pytest.approx(costs.kept_checkpoints(4) + logits, rel=0.05)


def measured():
    with (RESULTS / "2026-11-15-h200.csv").open(newline="") as file:
        return [row for row in csv.DictReader(file) if row["commit"] == "0cbbc9e" and row["workload"] == "train"]


def test_all_shapes_were_measured():
    assert {(row["shape"], row["length"], row["encoding"]) for row in measured()} == {
        (shape, length, encoding)
        for shape, length in (("155m", "1024"), ("155m", "8192"), ("smollm2-135m", "4096"), ("1.1b", "4096"))
        for encoding in ("rope", "tape")
    }


@pytest.mark.parametrize("row", measured(), ids=lambda row: f"{row['shape']}-{row['length']}-{row['encoding']}")
def test_memory_operations_and_time_are_those_measured(row):
    rows, length = int(row["batch"]), int(row["length"])
    costs = ModelCosts(SHAPES[row["shape"]].config(row["encoding"], "sdpa", length))
    assert costs.parameters == int(row["params"])
    assert 3 * costs.forward(rows, length, causal=False).total == 1e9 * float(row["gflops"])
    layout = Layout(gpus=1, context_parallel=1, sharded=False, checkpointing=False)
    plan = plan_training(costs, GPUS["h200"], layout, rows, length, "bfloat16")
    assert plan.memory.peak / 2**20 == pytest.approx(float(row["peak_mib"]), rel=0.02)
    assert 1e3 * plan.seconds == pytest.approx(float(row["ms_median"]), rel=0.13)


def test_mixed_precision_and_shards():
    """Weights in float32 with a rounded copy, gradients and two averages: 4 + 2, 4 and 8 bytes."""
    costs = ModelCosts(SHAPES["1.1b"].config("rope", "sdpa", 1024))
    one = training_memory(costs, 1)
    assert (one.weights, one.gradients, one.optimizer) == tuple(count * costs.parameters for count in (6, 4, 8))
    shared = training_memory(costs, 1, shards=8)
    assert (shared.weights, shared.optimizer) == (costs.parameters / 2, costs.parameters)
    assert shared.gathered > 2 * costs.layers[0].parameters
    few = training_memory(costs, 1, trained=1000)
    assert (few.weights, few.gradients) == (2 * costs.parameters + 4000, 4000)
