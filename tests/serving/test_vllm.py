"""vLLM answers as `generate` does: every encoding it can serve, in chunks, with shared prefixes, over several ranks and
over HTTP. Run by `make test-vllm`, in a separate environment; EQUITAPE_REPORT names the folder of the report.
"""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm", reason="make test-vllm installs vLLM in a separate environment")

import vllm_engine as served
from cases import CASES, gap

REFUSED = ("t5", "fire", "cope", "path", "path-gate", "path-learned", "rope-dynamic", "randpe-sampled", "tape2-carried")
LIKE_GEMMA = {
    "norms": "both",
    "norm_offset": 1.0,
    "query_scale": 0.2,
    "embedding_scale": 1.5,
    "hidden_act": "gelu_pytorch_tanh",
}
LIKE_OLMO = {"norms": "after", "qk_norm": True, "qk_norm_joint": True}
VARIANTS = {case: {"case": case} for case in CASES if case not in REFUSED} | {
    "tape, heads of 64": {"case": "tape", "hidden_size": 256},
    "tape2, heads of 64": {"case": "tape2", "hidden_size": 256},
    "tape2, loops": {"case": "tape2", "num_loops": 2, "num_hidden_layers": 4},
    "tape-clock, loops": {"case": "tape-clock", "num_loops": 2, "num_hidden_layers": 4},
    "tape2, one sliding layer": {"case": "tape2", "sliding_window": 20, "sliding_layers": [1]},
    "fox, sliding layers": {"case": "fox", "sliding_window": 20},
    "tape2, growing queries": {"case": "tape2", "query_growth": 0.7, "query_growth_start": 8},
    "tape2, growing queries, one sliding layer": {
        "case": "tape2",
        "query_growth": 0.7,
        "query_growth_start": 8,
        "sliding_window": 20,
        "sliding_layers": [1],
    },
    "tape, norms, biases, tied embeddings": {
        "case": "tape",
        "qk_norm": True,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "tape-clock, norms, biases": {"case": "tape-clock", "qk_norm": True, "attention_bias": True},
    "tape, as many key-value heads": {"case": "tape", "num_key_value_heads": 4},
    "tape, as in Gemma 2": {
        "case": "tape",
        **LIKE_GEMMA,
        "attention_softcap": 2.0,
        "logit_softcap": 3.0,
        "sliding_window": 20,
        "sliding_layers": [0],
    },
    "tape2, as in Gemma 3": {
        "case": "tape2",
        **LIKE_GEMMA,
        "qk_norm": True,
        "sliding_window": 20,
        "sliding_layers": [0],
        "local_encoding": {"kind": "rope", "theta": 100.0},
    },
    "tape2, as in OLMo 2": {"case": "tape2", **LIKE_OLMO},
    "tape-clock, as in SmolLM3": {"case": "tape-clock", "unrotated_layers": [1]},
}
HAS_FP8 = torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()
TOLERANCE = 1e-4
SECOND_TURN = [7, 8, 9]


@pytest.fixture
def record(request):
    """Adds rows to the results.json of a report."""
    folder = os.environ.get("EQUITAPE_REPORT")

    def add(check, name, **figures):
        if folder is None:
            return
        path = Path(folder) / "results.json"
        rows = json.loads(path.read_text()) if path.exists() else {}
        rows.setdefault(check, {})[name] = figures
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(rows, indent=1) + "\n")

    return add


def check_answers(model, rows, answers):
    """Tokens equal those of `generate`; returns the largest difference of log-probabilities."""
    worst = 0.0
    for row, (tokens, found, _) in zip(rows, answers, strict=True):
        assert tokens == served.greedy(model, row, len(tokens))
        worst = max(worst, gap(found, served.forced(model, [*row, *tokens])[len(row) - 1 :]))
    assert worst < TOLERANCE
    return worst


@pytest.mark.parametrize("name", VARIANTS)
def test_answers(name, tmp_path, record):
    model = served.save(**VARIANTS[name], folder=tmp_path)
    rows = served.prompts()
    with served.engine(tmp_path) as llm:
        first = served.answer(llm, rows)
        again = [[*row, *tokens, *SECOND_TURN] for row, (tokens, _, _) in zip(rows, first, strict=True)]
        second = served.answer(llm, again)
        # not in the cache yet
        row = served.draw_tokens(1, 75, seed=99)[0].tolist()
        found = served.force(llm, row)
    greedy_gap = max(check_answers(model, rows, first), check_answers(model, again, second))
    hits = [cached for _, _, cached in second]
    found_hits = [cached >= served.BLOCK for cached in hits]
    # vLLM keeps fewer blocks of layers with a window
    if model.config.sliding_window is None:
        assert found_hits == [len(row) > served.BLOCK for row in again]
    assert any(found_hits)
    forced_gap = gap(found, served.forced(model, row))
    assert forced_gap < TOLERANCE
    figures = {"greedy": greedy_gap, "forced": forced_gap, "cached tokens": sum(hits)}
    if name != "nope":
        figures["switched off"] = gap(found, served.forced(served.switched_off(model), row))
        assert figures["switched off"] > 100 * TOLERANCE
    record("answers", name, **figures)


# with tape2-decaying, only one of two processes has heads with columns
@pytest.mark.parametrize("case", ["tape2", "tape2-decaying", "tape2-values", "tape-clock"])
@pytest.mark.parametrize("layout", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_two_processes(case, layout, tmp_path, record):
    model = served.save(case, tmp_path, num_hidden_layers=4)
    rows = served.prompts()
    # vLLM on CPUs allocates what stages exchange in the warm-up of compiled models only
    eager = layout == "tensor_parallel_size"
    with served.engine(tmp_path, distributed_executor_backend="mp", enforce_eager=eager, **{layout: 2}) as llm:
        answers = served.answer(llm, rows)
    name = f"{case}, {layout.removesuffix('_size').replace('_', ' ')}"
    record("two processes", name, greedy=check_answers(model, rows, answers))


def test_more_ranks_than_key_value_heads(tmp_path, record):
    """Both ranks hold the key-value head, but norms over all heads count it once."""
    model = served.save("tape-clock", tmp_path, num_key_value_heads=1, **LIKE_OLMO)
    rows = served.prompts()
    with served.engine(tmp_path, distributed_executor_backend="mp", tensor_parallel_size=2) as llm:
        answers = served.answer(llm, rows)
    name = "tape-clock, one key-value head, as in OLMo 2, tensor parallel"
    record("two processes", name, greedy=check_answers(model, rows, answers))


@pytest.mark.parametrize("case", ["tape2", "tape-clock"])
def test_compiled(case, tmp_path, record):
    model = served.save(case, tmp_path)
    rows = served.prompts()
    with served.engine(tmp_path, enforce_eager=False) as llm:
        answers = served.answer(llm, rows)
    record("compiled", case, greedy=check_answers(model, rows, answers))


def test_bfloat16_reads_running_sums_exactly(tmp_path, record):
    """Log-probabilities of a gate and a clock differ from those of `generate` by no more than bfloat16's rounding of a
    model without them.
    """
    gaps = {}
    row = served.draw_tokens(1, 90, seed=5)[0].tolist()
    for case in ("rope", "rope-clock"):
        model = served.save(case, tmp_path / case)
        with served.engine(tmp_path / case, dtype="bfloat16") as llm:
            found = served.force(llm, row)
        gaps[case] = (found - served.forced(model.to(torch.bfloat16), row).float()).abs().mean().item()
    assert gaps["rope-clock"] < 2 * gaps["rope"] + 0.01
    record("bfloat16", "mean difference", **gaps)


@pytest.mark.skipif(not HAS_FP8, reason="vLLM's fp8 cache on a CPU needs AVX-512 or AMX")
def test_an_fp8_cache_costs_tape_no_more_than_rope(tmp_path, record):
    """A cache of eight bits rounds what is read; the field is rounded like any value, and still matters."""
    gaps = {}
    row = served.draw_tokens(1, 90, seed=5)[0].tolist()
    for case in ("rope", "tape"):
        model = served.save(case, tmp_path / case)
        with served.engine(tmp_path / case, kv_cache_dtype="fp8_e4m3") as llm:
            found = served.force(llm, row)
        gaps[case] = (found - served.forced(model, row)).abs().mean().item()
    gaps["tape, switched off"] = (found - served.forced(served.switched_off(model), row)).abs().mean().item()
    assert gaps["tape"] < 1.5 * gaps["rope"]
    assert gaps["tape, switched off"] > 1.5 * gaps["tape"]
    record("fp8 cache", "mean difference", **gaps)


def test_refusals_reach_the_user(tmp_path):
    served.save("t5", tmp_path / "t5")
    with pytest.raises(Exception, match="vLLM cannot serve encoding 't5'"), served.engine(tmp_path / "t5"):
        pass
    served.save("tape2", tmp_path / "tape2")
    unsuited = served.engine(tmp_path / "tape2", kv_cache_dtype="fp8")
    with pytest.raises(Exception, match="use kv_cache_dtype 'auto'"), unsuited:
        pass


def post(port, **body):
    data = json.dumps({"model": "tape2", "temperature": 0, "max_tokens": served.NEW, "return_token_ids": True, **body})
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", data.encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as response:
        return json.loads(response.read())["choices"][0]["token_ids"]


def wait_for(port, process):
    """Until the server answers; ten minutes at most, since a busy machine imports vLLM slowly."""
    for _ in range(1200):
        assert process.poll() is None, "the server ended"
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise AssertionError("the server did not start")


def test_five_requests_over_http_at_once(tmp_path, record):
    """A server and nothing else: the plugin is found by its entry point."""
    from equitape.data.tokenizers import byte_tokenizer

    model = served.save("tape2", tmp_path, vocab_size=258)
    byte_tokenizer().save_pretrained(tmp_path)
    rows = [*served.prompts(), [5, 6]]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server",
        "--model", str(tmp_path), "--port", str(port), "--dtype", "float32",
        "--enforce-eager", "--served-model-name", "tape2", "--max-num-batched-tokens", str(served.CHUNK),
        "--max-num-seqs", "8", "--block-size", str(served.BLOCK),
    ]  # fmt: skip
    settings = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with open(tmp_path / "server.log", "w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=settings)
        try:
            wait_for(port, process)
            with ThreadPoolExecutor(5) as pool:
                found = list(pool.map(lambda row: post(port, prompt=row, ignore_eos=True), rows))
        finally:
            process.terminate()
            process.wait(300)
    assert found == [served.greedy(model, row) for row in rows]
    record("HTTP", "tape2", requests=len(rows))
