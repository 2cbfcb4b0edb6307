"""Tokens per second that `generate` writes on one CPU core with a cache: our models and transformers' Llama.

    python benchmarks/cpu_generation.py FOLDER --encoding rope --encoding tape --encoding llama --output cpu.json

The folder holds a Llama model such as SmolLM2. Every encoding gets its weights. New weights of TAPE start at zero, so
in float32 "rope", "tape" and "llama" must write the same tokens, which is checked.
Seconds are those of the process on its core. The models take turns in every round, and ratios are taken within a round:
other programs on a busy machine slow all of them alike. The time of a token is that of a longer answer less that of a
shorter one, over the tokens between them.
"""

import argparse
import json
import statistics
import time
import warnings
from pathlib import Path

import torch
from torch import nn

from equitape.bench.subjects import LLAMA, parse_subject
from equitape.pretrained.families import translate_config
from equitape.pretrained.weights import convert, load_source
from equitape.runs.environment import describe_environment

SHORT, LONG = 2, 18
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.float32}
EXACT = ("rope", "tape", LLAMA)
"""These compute the same function before training."""


def model_of(text, folder, dtype):
    """A model in evaluation mode; int8 replaces its linear layers by torch's dynamically quantised ones."""
    source = load_source(folder, DTYPES[dtype])
    subject = parse_subject(text)
    if subject.kind != LLAMA:
        config = translate_config(source.config)
        config = type(config)(
            **{**config.to_dict(), "encoding": {"theta": config.encoding["theta"], **subject.encoding}}
        )
        source = convert(source, config)
    source.set_attn_implementation("sdpa")
    if dtype == "int8":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            source = torch.ao.quantization.quantize_dynamic(source, {nn.Linear}, torch.qint8)
    return source.eval()


def write(model, prompt, new_tokens):
    """Seconds of the process, and the tokens."""
    began = time.process_time()
    written = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new_tokens, min_new_tokens=new_tokens,
        do_sample=False,
    )  # fmt: skip
    seconds = time.process_time() - began
    assert written.shape[1] == prompt.shape[1] + new_tokens
    return seconds, written


def measure(model, prompt):
    """Milliseconds of a token, and of the prompt with the first token."""
    first, short, long = (write(model, prompt, count)[0] for count in (1, SHORT, LONG))
    return {"token": 1e3 * (long - short) / (LONG - SHORT), "prompt": 1e3 * first}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--encoding", action="append", required=True, help="the first one is what ratios refer to")
    parser.add_argument("--dtype", action="append", choices=list(DTYPES), help="default: float32")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompt")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    dtypes = given.dtype or ["float32"]
    models = {(text, dtype): model_of(text, given.folder, dtype) for dtype in dtypes for text in given.encoding}
    vocabulary = next(iter(models.values())).config.vocab_size
    prompt = torch.randint(vocabulary, (1, given.prompt), generator=torch.Generator().manual_seed(0))
    written = {name: write(model, prompt, LONG)[1] for name, model in models.items()}
    exact = [tokens for (text, dtype), tokens in written.items() if text in EXACT and dtype == "float32"]
    assert all(torch.equal(tokens, exact[0]) for tokens in exact), "models with equal weights wrote different tokens"
    rounds = [{name: measure(model, prompt) for name, model in models.items()} for _ in range(given.rounds)]
    first = next(iter(models))
    rows = []
    for text, dtype in models:
        name = (text, dtype)
        row = {"encoding": text, "dtype": dtype}
        for what in ("token", "prompt"):
            times = [each[name][what] for each in rounds]
            row[f"{what}_ms"] = [round(taken, 2) for taken in times]
            row[f"{what}_ratio"] = statistics.median(each[name][what] / each[first][what] for each in rounds)
        row["tokens_per_second"] = 1e3 / statistics.median(each[name]["token"] for each in rounds)
        rows.append(row)
        print(
            f"{text}, {dtype}: {row['tokens_per_second']:.1f} tokens per second (time {row['token_ratio']:.2f} of the "
            f"first), prompt {statistics.median(row['prompt_ms']):.0f} ms ({row['prompt_ratio']:.2f})"
        )
    about = {**describe_environment(), "model": given.folder.name, "prompt": given.prompt, "threads": 1}
    given.output.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
