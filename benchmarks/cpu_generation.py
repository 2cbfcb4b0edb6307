"""Tokens per second that `generate` writes on one CPU core, with a cache and random weights: ours and Llama.

    python benchmarks/cpu_generation.py --shape smollm2-135m --encoding rope --encoding tape --encoding llama

Seconds are those of the process on its core, so that other programs on a busy machine change them little. The time of a
token is that of a longer answer less that of a shorter one, over the tokens between them; the median of three.
"""

import argparse
import json
import statistics
import time

import torch

from equitape import EquitapeForCausalLM
from equitape.bench import SHAPES
from equitape.bench.others import as_llama
from equitape.bench.subjects import LLAMA, parse_subject
from equitape.bench.workloads import randomise_encoding
from equitape.runs.environment import describe_environment

SHORT, LONG = 2, 18


def model_of(text, shape):
    subject = parse_subject(text)
    torch.manual_seed(0)
    model = EquitapeForCausalLM(shape.config(subject.encoding, "sdpa", 2048))
    randomise_encoding(model)
    return (as_llama(model, "sdpa") if subject.kind == LLAMA else model).eval()


def seconds_of(model, prompt, new_tokens):
    began = time.process_time()
    written = model.generate(prompt, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False)
    assert written.shape[1] == prompt.shape[1] + new_tokens
    return time.process_time() - began


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="smollm2-135m")
    parser.add_argument("--encoding", action="append", required=True)
    parser.add_argument("--prompt", type=int, default=256, help="tokens of the prompt")
    given = parser.parse_args()
    torch.set_num_threads(1)
    shape = SHAPES[given.shape]
    prompt = torch.randint(shape.vocab_size, (1, given.prompt), generator=torch.Generator().manual_seed(0))
    print(json.dumps({"shape": given.shape, "prompt": given.prompt, "threads": 1, **describe_environment()}))
    for text in given.encoding:
        model = model_of(text, shape)
        seconds_of(model, prompt, SHORT)
        times = [
            (seconds_of(model, prompt, LONG) - seconds_of(model, prompt, SHORT)) / (LONG - SHORT) for _ in range(3)
        ]
        begins = statistics.median(seconds_of(model, prompt, 1) for _ in range(3))
        token = statistics.median(times)
        row = {"encoding": text, "tokens_per_second": 1 / token, "ms_per_token": [1e3 * t for t in times]}
        print(json.dumps({**row, "prompt_ms": 1e3 * begins}), flush=True)
