"""Many requests at once: tokens per second of `generate_batch` against a padded `generate`, for TAPE and RoPE.

    python benchmarks/continuous_batching.py --output benchmarks/results/2026-11-16-h200-continuous-batching.json

Requests have random prompts of 16 to 448 tokens and answers of 16 to 256, both log-uniform. Only tokens that a request
asked for count; a padded batch goes on to the longest answer. The padded batch holds all requests, padded on the left
to the longest prompt. It is measured with a dynamic cache, which is neither compiled nor captured, like
`generate_batch` without graphs, and with a static cache, whose step transformers compiles and replays as a CUDA graph.
Weights, dtype and attention are the same everywhere. Times are the best of `--repeats`, after a whole pass that
compiles and captures.

Tokens are compared with those of `generate`, one request at a time: in float32 all must be equal. In bfloat16, where
kernels round differently, answers may part only where the two best logits are closer than twice the rounding error of
`generate`'s logits there, which the same weights in float32 show.
"""

import argparse
import copy
import json
import math
import random
import time

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from equitape import EquitapeForCausalLM
from equitape.bench.shapes import SHAPES
from equitape.runs.environment import describe_environment

ENCODINGS = {"rope": {"kind": "rope"}, "tape": {"kind": "tape", "init_scale": 0.5}}
CHECKED_TOKENS = 24


def build(shape, encoding, dtype, device):
    torch.manual_seed(0)
    model = EquitapeForCausalLM(SHAPES[shape].config(encoding, "sdpa", 1024)).eval()
    with torch.no_grad():
        # random weights give almost equal logits: spread them, so that rounding seldom decides
        model.lm_head.weight.mul_(8.0)
    model.generation_config.update(eos_token_id=None, pad_token_id=0, do_sample=False)
    return model.to(device=device, dtype=dtype)


def draw_requests(count, vocab_size, longest_prompt, longest_answer):
    draw = random.Random(0)

    def length(longest):
        return round(math.exp(draw.uniform(math.log(16), math.log(longest))))

    return [
        ([draw.randrange(1, vocab_size) for _ in range(length(longest_prompt))], length(longest_answer))
        for _ in range(count)
    ]


def settings(requests, max_batch_tokens, graphs):
    page = "page_size" if hasattr(ContinuousBatchingConfig(), "page_size") else "block_size"
    size = 32
    blocks = sum(-(-(len(prompt) + new) // size) + 1 for prompt, new in requests)
    return ContinuousBatchingConfig(
        **{page: size}, num_blocks=blocks, max_batch_tokens=max_batch_tokens, use_cuda_graph=graphs,
        max_requests_per_batch=len(requests), allow_block_sharing=False,
    )  # fmt: skip


def serve(model, requests, max_batch_tokens, graphs, repeats):
    """Answers in the order of the requests, and the seconds of every pass over them."""
    seconds = []
    generation = GenerationConfig(eos_token_id=-1, pad_token_id=0, do_sample=False, max_new_tokens=512)
    with model.continuous_batching_context_manager(
        generation_config=generation,
        continuous_batching_config=settings(requests, max_batch_tokens, graphs),
    ) as manager:
        for attempt in range(repeats + 1):
            wait(model.device)
            began = time.perf_counter()
            for index, (prompt, new) in enumerate(requests):
                manager.add_request(prompt, request_id=f"{attempt}-{index}", max_new_tokens=new)
            answers = {}
            while len(answers) < len(requests):
                result = manager.get_result(timeout=1)
                if result is None:
                    if not manager.is_running():
                        raise RuntimeError("continuous batching stopped; see the log above")
                    continue
                if result.is_finished():
                    if result.error is not None:
                        raise RuntimeError(result.error)
                    answers[int(result.request_id.split("-")[1])] = result.generated_tokens
            wait(model.device)
            seconds.append(time.perf_counter() - began)
    return [answers[index] for index in range(len(requests))], seconds


def generate_padded(model, requests, cache, repeats):
    """Seconds of every pass over one batch, padded on the left. cache: "dynamic" or "static"."""
    longest = max(len(prompt) for prompt, _ in requests)
    tokens = torch.zeros(len(requests), longest, dtype=torch.long)
    for row, (prompt, _) in zip(tokens, requests, strict=True):
        row[longest - len(prompt) :] = torch.tensor(prompt)
    tokens = tokens.to(model.device)
    mask, new, seconds = (tokens > 0).long(), max(new for _, new in requests), []
    for _ in range(repeats + 1):
        wait(model.device)
        began = time.perf_counter()
        model.generate(tokens, attention_mask=mask, max_new_tokens=new, cache_implementation=cache)
        wait(model.device)
        seconds.append(time.perf_counter() - began)
    return seconds


def wait(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.no_grad()
def check_tokens(model, requests, answers):
    """Number of answers that equal those of `generate`; raises if one parts where `generate` was sure."""
    equal = 0
    for (prompt, new), answer in zip(requests, answers, strict=True):
        row = torch.tensor([prompt], device=model.device)
        written = model.generate(row, attention_mask=torch.ones_like(row), max_new_tokens=new)
        expected = written[0, len(prompt) :].tolist()
        if answer[:new] == expected:
            equal += 1
            continue
        place = next(index for index in range(new) if answer[index] != expected[index])
        before = torch.tensor([prompt + expected[:place]], device=model.device)
        logits = model(before, use_cache=False).logits[0, -1].float()
        best, second = logits.topk(2).values.tolist()
        rounding = 0.0
        if model.dtype != torch.float32:
            exact = copy.deepcopy(model).float()(before, use_cache=False).logits[0, -1]
            rounding = (logits - exact).abs().max().item()
        if not best - second <= 2 * rounding:
            raise AssertionError(
                f"A request of {len(prompt)} tokens got {answer[place]} for {expected[place]} at its token {place}; "
                f"the best logits there are {best:.3f} and {second:.3f}, rounded by up to {rounding:.3f}."
            )
    return equal


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="155m", choices=list(SHAPES))
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=448, help="tokens of the longest prompt")
    parser.add_argument("--answer", type=int, default=256, help="tokens of the longest answer")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--checked", type=int, default=8, help="requests whose tokens are compared")
    parser.add_argument("--max-batch-tokens", type=int, default=2048)
    parser.add_argument("--output", help="JSON file to write")
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    requests = draw_requests(given.requests, SHAPES[given.shape].vocab_size, given.prompt, given.answer)
    wanted = sum(new for _, new in requests)
    checked = [(prompt, min(new, CHECKED_TOKENS)) for prompt, new in requests[: given.checked]]
    rows, began = [], time.perf_counter()
    for kind, encoding in ENCODINGS.items():
        exact = build(given.shape, encoding, torch.float32, device)
        answers, _ = serve(exact, checked, 512, False, 0)
        assert check_tokens(exact, checked, answers) == len(checked)
        del exact
        model = build(given.shape, encoding, torch.bfloat16, device)
        ways = {"generate_batch": False}
        if device.type == "cuda":
            ways["generate_batch with CUDA graphs"] = True
        for way, graphs in ways.items():
            try:
                answers, seconds = serve(model, requests, given.max_batch_tokens, graphs, given.repeats)
                equal = check_tokens(model, checked, answers[: given.checked])
            except RuntimeError as error:
                print(f"{kind}, {way}: {error}", flush=True)
                continue
            best = min(seconds[1:])
            rows.append({"encoding": kind, "way": way, "seconds": best, "tokens_per_second": wanted / best,
                         "all_seconds": seconds, "equal_answers": equal, "checked": given.checked})  # fmt: skip
            print(f"{time.perf_counter() - began:5.0f} s  {kind:5} {way}: {wanted / best:,.0f} tokens/s", flush=True)
        for cache in ("dynamic", "static"):
            seconds = generate_padded(model, requests, cache, given.repeats)
            best, way = min(seconds[1:]), f"padded generate, {cache} cache"
            rows.append({"encoding": kind, "way": way, "seconds": best, "tokens_per_second": wanted / best,
                         "all_seconds": seconds})  # fmt: skip
            print(f"{time.perf_counter() - began:5.0f} s  {kind:5} {way}: {wanted / best:,.0f} tokens/s", flush=True)
        del model

    def fastest(kind, way):
        return max(row["tokens_per_second"] for row in rows if row["encoding"] == kind and row["way"].startswith(way))

    speed = {kind: fastest(kind, "generate_batch") for kind in ENCODINGS}
    ratios = {
        "tape_over_rope": speed["tape"] / speed["rope"],
        "tape_over_padded": speed["tape"] / fastest("tape", "padded"),
    }
    print(f"TAPE / RoPE {ratios['tape_over_rope']:.2f}, TAPE / fastest padded {ratios['tape_over_padded']:.2f}")
    if given.output:
        content = {"settings": vars(given), "tokens": wanted, "ratios": ratios, "rows": rows,
                   "environment": describe_environment()}  # fmt: skip
        with open(given.output, "w") as file:
            json.dump(content, file, indent=1)


if __name__ == "__main__":
    main()
