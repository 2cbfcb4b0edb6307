"""What the cache saves: the time of a new token with it and without, as `equitape eval` writes answers.

    python benchmarks/cached_decode.py SmolLM2-135M-Instruct --length 8192 --batch 1 --batch 32

Prompts are random tokens. The time of a token is that of a longer answer less that of a shorter one, over the tokens
between them, so that reading the prompt is not in it; the median of three. Without the cache everything is read again
for every token.
"""

import argparse
import json
import statistics
import time

import torch

from equitape.evaluation import load_subject
from equitape.evaluation.generate import write_tokens
from equitape.training.environment import describe_environment

SHORT = 1
LONG = {True: 33, False: 3}
"""Tokens of the longer answer, with the cache and without."""


def seconds_of(subject, prompts, new_tokens):
    """Of one call that writes answers of this many tokens."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    written = write_tokens(subject, prompts, new_tokens, ends=[])
    assert all(len(answer) == new_tokens for answer in written)
    return time.perf_counter() - began


def seconds_a_token(subject, prompts, cached):
    subject.uses_cache = cached
    seconds_of(subject, prompts, SHORT + 1)
    times = []
    for _ in range(3):
        short, long = (seconds_of(subject, prompts, count) for count in (SHORT, LONG[cached]))
        times.append((long - short) / (LONG[cached] - SHORT))
    return statistics.median(times)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--base", help="the pretrained model under an adapter")
    parser.add_argument("--length", type=int, default=8192, help="tokens of a prompt")
    parser.add_argument("--batch", type=int, action="append", help="prompts at a time, repeatable; 1 and 32 if none")
    parser.add_argument("--output", help="JSON file to write")
    given = parser.parse_args()
    subject = load_subject(given.model, base=given.base)
    vocabulary = subject.model.config.vocab_size
    found = []
    for batch in given.batch or (1, 32):
        generator = torch.Generator().manual_seed(0)
        prompts = torch.randint(vocabulary, (batch, given.length), generator=generator).tolist()
        with_cache, without = (seconds_a_token(subject, prompts, cached) for cached in (True, False))
        found.append({"batch": batch, "cached_ms": 1e3 * with_cache, "uncached_ms": 1e3 * without})
        print(
            f"{batch} x {given.length}: a token takes {1e3 * with_cache:.2f} ms with the cache, "
            f"{1e3 * without:.2f} ms without: {without / with_cache:.1f} times as long",
            flush=True,
        )
    if given.output:
        with open(given.output, "w") as file:
            json.dump({"length": given.length, "times": found, "environment": describe_environment()}, file, indent=1)


if __name__ == "__main__":
    main()
