"""Tokens per second of vLLM on this machine's CPU: equitape models against a Llama of the same size.

    .venv-vllm/bin/python benchmarks/vllm_throughput.py docs/results/vllm

Sixteen requests with prompts of 64 tokens and answers of 64, float32, random weights, prompts in chunks of 256. The
best and the worst of five passes, after one to warm up. Time on the clock depends on what else the machine does; the
time that its core spent on this process depends on it less, so models are compared by it. One thread: several wait for
each other in busy loops, and on a busy machine that counts as work. Llama runs first and last, to show how much a
repetition differs. Figures go to results.json in the folder.
"""

import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import torch

import vllm_engine as served
from equitape.runs.environment import find_commit

SHAPE = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
}
REQUESTS, PROMPT, ANSWER, PASSES = 16, 64, 64, 5


def save_model(kind, folder):
    torch.manual_seed(0)
    if kind == "Llama":
        from transformers import LlamaConfig, LlamaForCausalLM

        model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    else:
        from equitape import EquitapeConfig, EquitapeForCausalLM

        model = EquitapeForCausalLM(EquitapeConfig(**SHAPE, encoding=kind))
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def measure(folder):
    """Seconds of each pass, on the clock and of the cores."""
    draw = random.Random(0)
    seconds, core_seconds = [], []
    with served.engine(folder, max_num_batched_tokens=256, max_num_seqs=REQUESTS, enable_prefix_caching=False) as llm:
        for _ in range(PASSES + 1):
            rows = [[draw.randrange(1, 4096) for _ in range(PROMPT)] for _ in range(REQUESTS)]
            began, core_began = time.perf_counter(), time.process_time()
            served.answer(llm, rows, ANSWER)
            seconds.append(time.perf_counter() - began)
            core_seconds.append(time.process_time() - core_began)
    return seconds[1:], core_seconds[1:]


def main(folder):
    path = Path(folder) / "results.json"
    commit = str(find_commit()).removesuffix("+changes")
    rows = json.loads(path.read_text()) if path.exists() else {}
    table = rows["throughput"] = {}
    for name in ("Llama", "rope", "tape", "tape2", "fox", "Llama again"):
        with tempfile.TemporaryDirectory() as saved:
            parameters = save_model(name.removesuffix(" again"), saved)
            seconds, core_seconds = measure(saved)
        tokens = REQUESTS * ANSWER
        table[name] = {
            "parameters": parameters,
            "tokens per second": tokens / min(seconds),
            "tokens per core second": tokens / min(core_seconds),
            "slowest": tokens / max(core_seconds),
        }
        print(name, table[name], flush=True)
    # not the one that the tests began with, if the throughput was measured again
    rows["throughput commit"] = commit
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main(sys.argv[1])
