"""The benchmark on a tiny shape: what it measures, what it refuses to time, what it writes."""

import csv
import functools
import gc
import importlib.util
import io
import json
import os
import weakref
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from torch.utils._python_dispatch import TorchDispatchMode

import equitape.encodings.tape as tape
from command_line import call, in_one_line
from equitape.bench import SHAPES, WORKLOADS, BenchSettings, agreement, measure
from equitape.bench import rows as report
from equitape.bench import run as bench_run
from equitape.bench.others import path_scores, plain_attention
from equitape.bench.parts import AttentionPart
from equitape.bench.shapes import DEFAULT_ENCODINGS
from equitape.bench.subjects import PAPER, parse_subject
from equitape.bench.workloads import MEASURES, Case, Variant, build
from equitape.cuda_graph import CapturedStep
from equitape.report import benchmark

CPU = torch.device("cpu")
TINY = SHAPES["tiny"]
count_once = functools.cache(measure.count_operations)
COLUMNS = [
    "date", "commit", "gpu", "torch", "transformers", "triton", "dtype", "compile", "shape", "workload", "encoding",
    "batch", "length", "ms_median", "ms_low", "ms_high", "ratio", "peak_mib", "params", "gflops",
]  # fmt: skip


def make_case(name="core", encoding="tape", **changes):
    sizes = {"shape": TINY, "batch": 2, "length": 12, "dtype": torch.float32, "device": CPU, "input_sets": 3}
    return Case(measure=name, encoding=encoding, **{**sizes, **changes})


def quick(**changes):
    return BenchSettings(
        **{
            "quick": True,
            "runs": 2,
            "lengths": (12,),
            "batches": (2,),
            "input_sets": 3,
            "device": "cpu",
            "dtype": "float32",
            "shape": "tiny",
            **changes,
        }
    )


def make_row(**changes):
    about = dict.fromkeys(("date", "commit", "gpu", "torch", "transformers", "triton", "dtype", "shape"), "some")
    measured = {"compile": False, "workload": "train", "encoding": "rope", "batch": 2, "length": 128, "ms_median": 3.2}
    return report.Row(**{**about, **measured, **changes})


@pytest.fixture(autouse=True)
def _quick_rows(monkeypatch):
    """Without what takes longer than the rest of a row: counting the operations of a case again, freeing memory."""
    monkeypatch.setattr(bench_run, "count_operations", count_once)
    monkeypatch.setattr(bench_run, "free_memory", lambda: None)


def run_quietly(settings):
    return list(bench_run.run(settings, Console(file=io.StringIO())))


@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("name", ["attention", "attention+backward", "core+backward"])
def test_paper_layout_is_our_layer_computed_another_way(name, kv_heads):
    shape = replace(TINY, num_kv_heads=kv_heads)
    case = make_case(name, shape=shape, dtype=torch.float64)
    ours = build(case, Variant(dtype=torch.float64)).outputs()
    theirs = build(replace(case, encoding=PAPER), Variant(dtype=torch.float64)).outputs()
    assert set(ours) == set(theirs)
    assert "state" in ours
    assert ("gradient of the state" in ours) == name.endswith("backward")
    for key in ours:
        assert agreement.distance(theirs[key], ours[key]) < 1e-12, key


@pytest.mark.parametrize("kind", ["rope", "tape"])
@pytest.mark.parametrize("name", ["attention", "attention+backward"])
def test_a_standalone_layer_is_the_decoder_s_layer(kind, name):
    case = make_case(name, kind, dtype=torch.float64)
    decoder = build(case, Variant(dtype=torch.float64)).outputs()
    alone = build(replace(case, encoding=f"{kind}-nn"), Variant(dtype=torch.float64)).outputs()
    assert set(alone) == set(decoder)
    for key in alone:
        assert agreement.distance(alone[key], decoder[key]) == 0, key


class CountedOperations(TorchDispatchMode):
    """Counts what PyTorch is asked to compute."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        self.found[str(function)] += 1
        return function(*arguments, **(keywords or {}))


@pytest.mark.parametrize("kind", ["rope", "tape"])
@pytest.mark.parametrize("name", ["attention", "attention+backward"])
def test_a_standalone_layer_asks_for_the_operations_of_the_decoder_s(kind, name):
    counts = []
    for encoding in (kind, f"{kind}-nn"):
        prepared = build(make_case(name, encoding), Variant(dtype=torch.float32))
        with CountedOperations() as counted:
            prepared.call(0)
        counts.append(counted.found)
    assert counts[0].total() > 20
    assert counts[0] == counts[1]


def test_standalone_layers_are_measured_as_attention_only():
    rows = run_quietly(quick(workloads=("attention", "core"), encodings=("tape-nn",)))
    assert {(row.workload, row.status) for row in rows} == {("attention", "ok"), ("attention+backward", "ok")}
    with pytest.raises(
        ValueError, match="'tape-nn' is a part of a layer, not a model; measure it with workload attention"
    ):
        quick(workloads=("train",), encodings=("tape-nn",))


def test_parts_agree_between_implementations_and_differ_between_encodings():
    path = build(make_case("attention", dtype=torch.float64), Variant(dtype=torch.float64))
    eager = build(make_case("attention", dtype=torch.float64), Variant(attention="eager", dtype=torch.float64))
    for key, tensors in path.outputs().items():
        assert agreement.distance(tensors, eager.outputs()[key]) < 1e-12
    rope = build(make_case("attention", "rope", dtype=torch.float64), Variant(dtype=torch.float64)).outputs()
    assert agreement.distance(rope["attended"], path.outputs()["attended"]) > 1e-3


@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_workload_and_encoding_gives_complete_rows(workload):
    rows = run_quietly(quick(workloads=(workload,)))
    encodings = [kind for kind in DEFAULT_ENCODINGS if workload in ("attention", "core") or kind != PAPER]
    assert [row.encoding for row in rows] == [*encodings, "rope (again)"] * len(MEASURES[workload])
    for row in rows:
        assert (row.status, row.note) == (report.OK, "")
        assert 0 < row.ms_low <= row.ms_median <= row.ms_high
        assert row.ratio > 0
        assert row.gflops == 2 * row.gmacs > 0
        assert row.peak_mib is None
        assert row.params is not None
        assert row.torch == torch.__version__
    assert rows[0].ratio == 1.0


def lose_the_mix(monkeypatch):
    """Break the path, not the reference: it alone runs with the plain kernels."""
    real = tape.update_field

    def broken(field, attended, gate, carry, mix_in, mix_out, normalize=False):
        if os.environ.get("EQUITAPE_KERNELS") != "reference":
            gate = 0 * gate
        return real(field, attended, gate, carry, mix_in, mix_out, normalize)

    monkeypatch.setattr(tape, "update_field", broken)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_broken_path_is_not_timed(monkeypatch, workload):
    lose_the_mix(monkeypatch)
    settings = quick(workloads=(workload,), encodings=("rope", "tape"))
    rows = [row for row in run_quietly(settings) if row.encoding == "tape"]
    assert rows
    for row in rows:
        assert row.status == report.DISAGREES
        assert "allowed" in row.note
        assert row.ms_median is row.ratio is row.ms_low is None


def test_nan_and_missing_outputs_disagree():
    expected = {"logits": [torch.ones(3)]}
    assert agreement.compare({"logits": [torch.full((3,), float("nan"))]}, expected, {"logits": 0.1})
    assert agreement.compare({}, expected, {"logits": 0.1})
    assert agreement.compare({"logits": [torch.ones(2)]}, expected, {"logits": 0.1})
    assert not agreement.compare({"logits": [torch.ones(3)]}, expected, {"logits": 0.1})


def test_a_reference_too_large_is_compared_at_a_smaller_size(monkeypatch):
    real = agreement.build

    def little_memory(case, variant):
        if variant.attention == "eager" and case.batch * case.length > 300:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(case, variant)

    monkeypatch.setattr(agreement, "build", little_memory)
    rows = run_quietly(quick(workloads=("core",), encodings=("tape",), lengths=(256,), batches=(4,)))
    assert [row.note for row in rows] == ["compared at 1 x 256"] * 2
    assert all(row.ms_median for row in rows)


def test_out_of_memory_and_failures_are_rows(monkeypatch):
    errors = iter([torch.OutOfMemoryError("CUDA out of memory. Tried"), RuntimeError("no kernel\nfor this")])

    def fail(case, variant):
        raise next(errors)

    monkeypatch.setattr(bench_run, "checked_run", fail)
    rows = run_quietly(quick(workloads=("prefill",), encodings=("nope", "tape")))
    assert [row.status for row in rows] == [report.OUT_OF_MEMORY, report.FAILED]
    assert rows[1].note == "RuntimeError: no kernel"


def test_operations_are_those_on_paper():
    """Two matrix products of scores and values a head, doubled by multiply and add; TAPE adds, the paper's layout more."""
    case = make_case(encoding="rope")
    heads, tokens, dim = TINY.num_heads, case.length, TINY.head_dim
    rope = measure.count_operations(case)
    assert rope == case.batch * heads * 2 * (2 * tokens * tokens * dim)
    ours = measure.count_operations(replace(case, encoding="tape"))
    theirs = measure.count_operations(replace(case, encoding=PAPER))
    assert rope < ours < theirs


def test_inputs_take_turns():
    seen = []
    path = build(make_case(), Variant(dtype=torch.float32))
    path.call = seen.append
    timing = measure.time_run(path, make_case(), runs=5, warm_up=3)
    assert seen == [0, 1, 2, 0, 1, 2, 0, 1]
    assert len(timing.milliseconds) == 5
    assert timing.spread[0] <= timing.median <= timing.spread[1]


def test_command_line_writes_table_json_csv_and_plot(tmp_path):
    file, picture = tmp_path / "rows.csv", tmp_path / "time.png"
    arguments = ["bench", "--quick", "--runs", "1", "--shape", "tiny", "--workload", "prefill", "--workload", "decode"]
    arguments += ["--encoding", "rope", "--encoding", "tape", "--length", "8", "--length", "16", "--cache-length", "9"]
    arguments += ["--batch", "2", "--dtype", "float32", "--no-compile", "--csv", str(file), "--plot", str(picture)]
    result = call(*arguments, "--json")
    found = json.loads(result.stdout)
    assert [(row["workload"], row["encoding"], row["length"]) for row in found["rows"]] == [
        (workload, encoding, length)
        for workload, length in (("prefill", 8), ("prefill", 16), ("decode", 9))
        for encoding in ("rope", "tape", "rope (again)")
    ]
    assert len(found["rope_drift"]) == 3
    with file.open(newline="") as opened:
        lines = list(csv.DictReader(opened))
    assert len(lines) == 9
    assert list(lines[0])[:20] == COLUMNS
    assert picture.read_bytes()[1:4] == b"PNG"
    assert f"Written to {file} and {picture}." in result.stderr
    # a second run adds its lines below, and prints a table
    arguments = ["bench", "--quick", "--runs", "1", "--shape", "tiny", "--workload", "prefill", "--encoding", "rope"]
    arguments += ["--encoding", "tape", "--length", "8", "--batch", "2", "--dtype", "float32", "--no-compile"]
    result = call(*arguments, "--csv", file)
    assert "to RoPE" in result.output
    assert "measured again" in result.output
    assert len(file.read_text().splitlines()) == 13


def test_encodings_take_options_and_llama_is_our_rope(tmp_path):
    """The llama row is timed only if it agrees with our RoPE; so is TAPE in one block and a row that is not compiled."""
    texts = ("rope", "tape  layers=[0]", "llama", "llama compile=false")
    table = tmp_path / "table.md"
    rows = run_quietly(quick(workloads=("train", "prefill", "decode"), encodings=texts, layers=3, once=True))
    assert [row.encoding for row in rows] == ["rope", "tape layers=[0]", "llama", "llama compile=false"] * 3
    assert [(row.status, row.note, row.compile) for row in rows] == [(report.OK, "", False)] * 12
    rope, one, llama, _ = rows[:4]
    assert (llama.params, llama.gflops) == (rope.params, rope.gflops)
    assert (
        rope.params < one.params < run_quietly(quick(workloads=("prefill",), encodings=("tape",), layers=3))[0].params
    )
    table.write_text(benchmark.by_length(rows))
    assert "| tokens | rope | tape layers=[0] | llama | llama compile=false |" in table.read_text()


def test_a_cache_length_that_nothing_uses_is_refused():
    with pytest.raises(ValueError, match="--cache-length only applies to the workload decode"):
        quick(workloads=("train", "prefill"), cache_lengths=(9,))


def test_a_wrong_llama_is_not_timed(monkeypatch):
    from equitape.bench import others

    real = others.LlamaConfig
    monkeypatch.setattr(others, "LlamaConfig", lambda **sizes: real(**{**sizes, "rms_norm_eps": 0.1}))
    rows = run_quietly(quick(workloads=("train", "prefill"), encodings=("llama",)))
    assert [row.status for row in rows] == [report.DISAGREES] * 2


def test_compile_is_chosen_for_each(monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: asked.append(options["fullgraph"]) or function)
    rows = run_quietly(quick(workloads=("prefill",), encodings=("rope", "rope compile=false"), compile=True, once=True))
    assert [row.compile for row in rows] == [True, False]
    assert asked == [True]


def test_options_are_words_of_a_shell():
    subject = parse_subject("""tape scaling="{kind: linear, factor: 4}" layers=0,1 compile=no""")
    assert subject.options == {"scaling": {"kind": "linear", "factor": 4}, "layers": [0, 1]}
    assert subject.compile is False


def test_a_second_kind_among_the_options_is_refused():
    with pytest.raises(ValueError, match="names two kinds; write the kind first, without kind="):
        parse_subject("tape kind=rope")


@pytest.mark.skipif(importlib.util.find_spec("fla") is not None, reason="flash-linear-attention is installed")
@pytest.mark.parametrize("kind", ["fla-rope", "fla-fox", "fla-path"])
def test_layers_of_a_missing_package_are_refused(kind):
    with pytest.raises(ValueError, match=r"needs the package flash-linear-attention; run `pip install"):
        quick(encodings=(kind,))


def plain_layer(**parts):
    """Weights of a layer of flash-linear-attention, without the package."""
    width, heads, groups = TINY.hidden_size, TINY.num_heads, TINY.num_kv_heads
    sizes = {"q_proj": width, "k_proj": groups * 16, "v_proj": groups * 16, "o_proj": width}
    linear = {name: torch.nn.Linear(width, size, bias=False) for name, size in sizes.items()}
    layer = SimpleNamespace(head_dim=TINY.head_dim, num_heads=heads, rope_theta=10000.0, **linear, **parts)
    for module in vars(layer).values():
        if isinstance(module, torch.nn.Module):
            module.double()
    return layer


@pytest.mark.parametrize("kind", ["fla-rope", "fla-fox", "fla-path"])
def test_plain_forms_of_other_layers_are_ours(kind):
    """RoPE, FoX and PaTH of both libraries are one function; FoX's gate is the sigmoid of the opposite sign."""
    torch.manual_seed(0)
    layer = plain_layer(f_proj=torch.nn.Linear(64, 4))
    part = AttentionPart(TINY, kind.removeprefix("fla-"), "eager", 12, projections=True).double()
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        getattr(part.attention, name).weight.data = getattr(layer, name).weight.data
    if kind == "fla-fox":
        decay = part.attention.encoding.decay
        torch.nn.init.normal_(decay.weight)
        # ours has a gate for each key-value head
        layer.f_proj.weight.data = -decay.weight.data.repeat_interleave(2, 0)
        layer.f_proj.bias.data = -decay.bias.data.repeat_interleave(2, 0)
    if kind == "fla-path":
        path = part.attention.encoding
        torch.nn.init.normal_(path.strength_bias)
        layer.w_proj = torch.nn.Sequential(path.down, path.up)
        layer.w_conv1d = torch.nn.Conv1d(32, 32, 3, groups=32, bias=False).double()
        layer.w_conv1d.weight.data = path.taps.data.view(32, 1, 3)
        layer.bt_proj = torch.nn.Linear(64, 2).double()
        layer.bt_proj.weight.data, layer.bt_proj.bias.data = path.strength.data, path.strength_bias.data
    hidden = torch.randn(2, 12, 64, dtype=torch.float64)
    state = part.initial_state(hidden)
    expected = part.attention(hidden, state, part.positions, part.attention_mask, part.scaling).output
    torch.testing.assert_close(plain_attention(layer, kind, hidden), expected, atol=1e-12, rtol=1e-12)


@torch.no_grad()
def test_path_scores_are_products_of_reflections():
    torch.manual_seed(0)
    convolution = torch.nn.Conv1d(32, 32, 3, groups=32, bias=False)
    layer = plain_layer(w_proj=torch.nn.Linear(64, 32), w_conv1d=convolution, bt_proj=torch.nn.Linear(64, 2))
    hidden = torch.randn(1, 5, 64, dtype=torch.float64)
    query, key = torch.randn(2, 1, 4, 5, 16, dtype=torch.float64)
    found = path_scores(layer, hidden, query, key)
    padded = torch.cat((torch.zeros(1, 2, 32, dtype=torch.float64), layer.w_proj(hidden)), dim=1)
    for head in range(4):
        channels = slice(16 * (head // 2), 16 * (head // 2) + 16)
        for i in range(5):
            for j in range(i + 1):
                seen = key[0, head, j]
                for t in range(j + 1, i + 1):
                    taps = sum(convolution.weight[channels, 0, n] * padded[0, t + n, channels] for n in range(3))
                    w = torch.nn.functional.silu(taps)
                    w = w / (w @ w + 1e-6).sqrt()
                    beta = 2 * layer.bt_proj(hidden[0, t])[head // 2].sigmoid()
                    seen = seen - beta * w * (w @ seen)
                assert float(found[0, head, i, j]) == pytest.approx(float(seen @ query[0, head, i]), rel=1e-9)


def test_a_measurement_out_of_time_stops_after_three_runs():
    (row,) = run_quietly(quick(workloads=("prefill",), encodings=("rope",), runs=50, seconds=1e-6))
    assert row.note == "3 runs"


def test_measurements_can_be_shown_again(tmp_path):
    file, table, picture = tmp_path / "rows.csv", tmp_path / "table.md", tmp_path / "time.svg"
    rows = [
        make_row(ratio=1.0, peak_mib=700.0, compile=True),
        make_row(encoding="cope", ms_median=None, status=report.OUT_OF_MEMORY),
        make_row(length=1048576, ms_median=81.5, peak_mib=None),
    ]
    for row in rows:
        report.append_csv(file, row)
    assert report.read_csv(file) == rows
    arguments = ["bench", "--show", str(file), "--table", str(table), "--plot", str(picture)]
    call(*arguments)
    assert "| 128 | 3.200 (1.00), 700 | out of memory |" in table.read_text()
    assert "| 1,048,576 | 81.50 |  |" in table.read_text()
    with benchmark.benchmark_figure(rows) as figure:
        assert [axes.get_title(loc="left") or axes.get_title() for axes in figure.axes] == ["train", "train, memory"]


def test_a_disagreement_sets_the_exit_code(monkeypatch):
    lose_the_mix(monkeypatch)
    sizes = ["--shape", "tiny", "--length", "12", "--dtype", "float32"]
    result = call("bench", "--quick", "--workload", "core", "--encoding", "tape", *sizes, code=1)
    assert "disagrees" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "155"], "155m"),
        (["--workload", "training"], "train"),
        (["--encoding", "tapes"], "tape"),
        (["--dtype", "int8"], "float32"),
        (["--runs", "5"], "20"),
        (["--length", "1"], "length"),
        (["--batch", "0"], "batch"),
        (["--width", "50"], "multiple"),
        (["--encoding", "tape-paper", "--workload", "train"], "part"),
        (["--length", "many"], "'many'"),
        (["--encoding", "tape layers"], "key=value"),
        (["--encoding", "tape layer=[0]"], "layers"),
        (["--encoding", "tape layers=[7]", "--workload", "train"], "allowed"),
        (["--encoding", "rope compile=maybe"], "maybe"),
        (["--encoding", "rope 'theta=1"], "quote"),
        (["--encoding", "llama", "--workload", "core"], "a model"),
        (["--encoding", "llama theta=1"], "no options"),
        (["--encoding", "fla-path", "--workload", "train"], "a part of a layer"),
        (["--show", "none.csv"], "none.csv"),
    ],
)
def test_wrong_input_exits_with_2(arguments, message):
    result = call("bench", *arguments, code=2)
    assert message in result.output


@pytest.mark.parametrize(
    ("option", "name", "message"),
    [
        ("--csv", "other.csv", "'other.csv' has different columns from this benchmark; choose a new file."),
        ("--csv", "binary.csv", "'binary.csv' has different columns from this benchmark; choose a new file."),
        ("--csv", "folder", "'folder' is a folder; give a file name."),
        ("--csv", "none/a.csv", "Cannot write 'none/a.csv': the folder 'none' does not exist; create it first."),
        ("--plot", "a.txt", "Cannot write a plot to 'a.txt'; the name must end in one of .png, .pdf, .svg"),
        ("--plot", "a", "Cannot write a plot to 'a'"),
        ("--plot", "folder", "'folder' is a folder; give a file name."),
        ("--plot", "none/a.png", "Cannot write 'none/a.png': the folder 'none' does not exist; create it first."),
    ],
)
def test_files_are_refused_before_anything_is_measured(option, name, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench_run, "measure", lambda *_: pytest.fail("measured"))
    (tmp_path / "folder").mkdir()
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    (tmp_path / "binary.csv").write_bytes(b"\xff\x00\n")
    result = call("bench", "--quick", option, name, code=2)
    assert message in in_one_line(result.stderr)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["binary.csv", "folder", "other.csv"]
    assert (tmp_path / "other.csv").read_text() == "a,b\n1,2\n"


@pytest.mark.parametrize("ending", report.PICTURES)
def test_every_ending_that_is_allowed_can_be_written(ending, tmp_path):
    benchmark.write_plot([make_row()], tmp_path / f"time{ending}")
    assert [path.name for path in tmp_path.iterdir()] == [f"time{ending}"]


def test_sizes_can_be_changed():
    settings = quick(layers=5, width=128)
    assert (settings.model_shape.num_layers, settings.model_shape.num_heads) == (5, 8)
    assert settings.model_shape.num_kv_heads == 4
    assert settings.model_shape.name == "tiny, 5 layers, width 128"
    assert BenchSettings(device="cpu").num_runs == 20
    assert quick(encodings=("tape", "rope")).encodings_for("train") == ("rope", "tape", "rope")
    assert quick(encodings=("rope",)).encodings_for("train") == ("rope",)


def test_a_captured_step_keeps_what_it_reads_alive():
    """A CUDA graph holds addresses: if the model behind a captured step is freed, its replay reads what comes after."""
    played = []
    logits = torch.ones(3)

    def capture():
        model = torch.nn.Linear(3, 3)
        graph = SimpleNamespace(replay=lambda: played.append(True))
        return CapturedStep(graph, logits, lambda: model(logits)), weakref.ref(model)

    replay, model = capture()
    gc.collect()
    assert model() is not None
    assert replay() is logits
    assert played == [True]


def test_rope_is_measured_twice_unless_once_is_set():
    chosen = ("tape", "rope")
    assert BenchSettings(encodings=chosen, device="cpu").encodings_for("train") == ("rope", "tape", "rope")
    assert BenchSettings(encodings=chosen, device="cpu", once=True).encodings_for("train") == ("rope", "tape")


def test_graphs_are_a_mode_of_the_compiler(monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: asked.append(options["mode"]) or function)
    graphs = {}
    for name in ("prefill", "train", "decode", "core"):
        for wanted in (False, True):
            variant = Variant(dtype=torch.float32, compiled=True, graphs=wanted)
            graphs[name, wanted] = build(make_case(name, encoding="rope"), variant).graphs
    assert [key for key, value in graphs.items() if value] == [("prefill", True), ("train", True)]
    assert asked == [None, "reduce-overhead"] * 2 + [None, None] * 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA graphs are available")
def test_graphs_need_cuda():
    with pytest.raises(ValueError, match="--graphs needs compiled code on CUDA"):
        quick(graphs=True)


@pytest.mark.parametrize("times", [(3.739, 5.109), (9.627, 13.435), (5.0,), (0.0199, 0.0201), (0.4, 370.0)])
def test_a_plot_of_one_length_has_ticks_to_read_it_by(times):
    with benchmark.benchmark_figure(
        [make_row(encoding=f"e{index}", ms_median=time) for index, time in enumerate(times)]
    ) as figure:
        (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["128"]
    low, high = axes.get_xlim()
    assert low < 128 < high < 1024
    assert 128 / low == pytest.approx(high / 128), "in the middle"
    low, high = axes.get_ylim()
    assert low < min(times) <= max(times) < high
    assert high / low <= 5.01 * 5.01 * max(times) / min(times)
    ticks = [tick for tick in axes.get_yticks() if low * 0.999 <= tick <= high * 1.001]
    assert len(ticks) >= 2
    assert {f"{tick:e}"[0] for tick in ticks} <= {"1", "2", "5"}


def test_a_plot_of_several_lengths_has_ticks_at_each():
    with benchmark.benchmark_figure(
        [make_row(length=length, ms_median=length / 30) for length in (64, 100, 512)]
    ) as figure:
        (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["64", "100", "512"]


@pytest.mark.parametrize("peak", [None, 1234.0])
def test_memory_is_a_column_only_where_it_is_measured(peak):
    shown = io.StringIO()
    benchmark.print_table([make_row(), make_row(encoding="tape", peak_mib=peak, gflops=77.0)], Console(file=shown))
    assert ("peak MiB" in shown.getvalue()) == (peak is not None)
    assert ("1,234" in shown.getvalue()) == (peak is not None)
    assert "77" in shown.getvalue()


def test_unsteady_times_are_marked_and_warned_about():
    """From the tenth to the ninetieth percentile more than half of the median."""
    steady = make_row(ms_low=3.0, ms_high=3.9)
    unsteady = make_row(encoding="tape", ms_low=2.9, ms_high=14.0, ratio=1.0)
    assert (steady.unsteady, unsteady.unsteady, make_row().unsteady) == (False, True, False)

    def shown(*rows):
        console = Console(file=io.StringIO(), width=160)
        benchmark.print_table(rows, console)
        return console.file.getvalue()

    assert "unsteady" not in shown(steady)
    found = shown(steady, unsteady)
    assert "-9% +338% !" in found
    assert "This machine is unsteady: in 1 of 2 measurements" in found
    assert [row["unsteady"] for row in json.loads(report.to_json([steady, unsteady]))["rows"]] == [False, True]


def test_plots_carry_spread_bars(monkeypatch):
    bars = []
    monkeypatch.setattr("matplotlib.axes.Axes.errorbar", lambda self, x, y, yerr, **rest: bars.append((x, y, yerr)))
    rows = [make_row(ms_low=3.0, ms_high=4.0), make_row(length=256, ms_median=6.0, ms_low=5.0, ms_high=9.0)]
    with benchmark.benchmark_figure(rows) as figure:
        assert "10th to the 90th percentile" in figure.get_suptitle()
        assert "unsteady machine" in figure.get_suptitle()
        assert figure.axes[0].get_ylim()[1] >= 9.0
    ((x, y, (below, above)),) = bars
    assert (x, y) == ([128, 256], [3.2, 6.0])
    assert below == pytest.approx([0.2, 1.0])
    assert above == pytest.approx([0.8, 3.0])
