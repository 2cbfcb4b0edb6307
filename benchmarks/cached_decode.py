"""What the cache saves: the time of a new token with it and without, as `equitape eval` writes answers.

    python benchmarks/cached_decode.py SmolLM2-135M-Instruct --length 8192 --batch 1 --batch 32

Prompts are random tokens. The time of a token is that of a longer answer less that of a shorter one, over the tokens
between them, so that neither reading the prompt nor capturing a step is in it; the median of three. With the cache it
is measured twice: by a step replayed as a CUDA graph, where the model allows it, and by transformers' generate. Without
the cache everything is read again for every token. What a capture takes is the time of the shorter answer by the graph,
less that of its tokens and that of reading the prompt, which is what a single token takes by generate.
"""

import argparse
import json
import statistics
import time

import torch

from equitape.evaluation import load_evaluated_model
from equitape.runs.environment import describe_environment
from equitape.tasks.decoding import write_tokens
from equitape.tasks.static_decoding import PLAIN_STEPS, choose_writing, takes_steps

TOKENS = {"graph": (16, 80), "generate": (1, 33), "uncached": (1, 3)}
"""Of the shorter and the longer answer. That of a graph is long enough to be worth one."""


def seconds_of(evaluated, prompts, new_tokens):
    """Of one call that writes answers of this many tokens."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    written = write_tokens(evaluated, prompts, new_tokens, ends=[])
    assert all(len(answer) == new_tokens for answer in written)
    return time.perf_counter() - began


def measure(evaluated, prompts, way):
    """Seconds of the shorter answer, and of every further token."""
    evaluated.uses_cache = way != "uncached"
    evaluated.writing = "graph" if way == "graph" else "generate"
    short, long = TOKENS[way]
    seconds_of(evaluated, prompts, short + 1)
    times = [[seconds_of(evaluated, prompts, count) for count in (short, long)] for _ in range(3)]
    if way == "graph" and choose_writing(evaluated, [len(prompt) for prompt in prompts], long) != "graph":
        raise SystemExit("This model's step cannot be captured; a warning above may say why.")
    beginning = statistics.median(first for first, _ in times)
    return beginning, statistics.median((second - first) / (long - short) for first, second in times)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--base", help="the pretrained model under an adapter")
    parser.add_argument("--length", type=int, default=8192, help="tokens of a prompt")
    parser.add_argument("--batch", type=int, action="append", help="prompts at a time, repeatable; 1 and 32 if none")
    parser.add_argument("--output", help="JSON file to write")
    given = parser.parse_args()
    evaluated = load_evaluated_model(given.model, base=given.base)
    # random prompts may be followed by anything
    evaluated.model.generation_config.eos_token_id = None
    captures = evaluated.device.type == "cuda" and takes_steps(evaluated)
    vocabulary = evaluated.model.config.vocab_size
    found = []
    for batch in given.batch or (1, 32):
        generator = torch.Generator().manual_seed(0)
        prompts = torch.randint(vocabulary, (batch, given.length), generator=generator).tolist()
        reading, plain = measure(evaluated, prompts, "generate")
        _, without = measure(evaluated, prompts, "uncached")
        times = {"batch": batch, "cached_ms": 1e3 * plain, "plain_cached_ms": 1e3 * plain, "uncached_ms": 1e3 * without}
        text = "no CUDA graph"
        if captures:
            beginning, replayed = measure(evaluated, prompts, "graph")
            tokens = PLAIN_STEPS * plain + (TOKENS["graph"][0] - PLAIN_STEPS) * replayed
            times |= {"cached_ms": 1e3 * replayed, "capture_ms": 1e3 * (beginning - reading - tokens)}
            text = f"{1e3 * plain:.2f} ms by generate; a capture takes {times['capture_ms']:.0f} ms"
        found.append(times)
        print(
            f"{batch} x {given.length}: a token takes {times['cached_ms']:.2f} ms with the cache ({text}), "
            f"{times['uncached_ms']:.2f} ms without: {times['uncached_ms'] / times['cached_ms']:.1f} times as long",
            flush=True,
        )
    if given.output:
        with open(given.output, "w") as file:
            json.dump({"length": given.length, "times": found, "environment": describe_environment()}, file, indent=1)


if __name__ == "__main__":
    main()
