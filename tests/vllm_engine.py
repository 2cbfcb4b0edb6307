"""Small saved models under vLLM, and the same answers from `generate`."""

import contextlib
import gc
import os

# engines in this process: a start takes seconds instead of a minute
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch

from cases import build, draw_tokens

NEW = 12
CHUNK, BLOCK = 16, 32
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 160,
    "eos_token_id": None,
    "bos_token_id": None,
}
"""Heads of 32 channels, the fewest that vLLM's kernels for CPUs support."""


def save(case, folder, options=None, **shape):
    """A model with random weights, saved to a folder."""
    model = build(case, options, dtype=torch.float32, **{**SIZES, **shape})
    model.save_pretrained(folder)
    return model


def prompts():
    """Shorter and longer than a chunk and a block."""
    return [draw_tokens(1, length, seed=length)[0].tolist() for length in (3, 40, 21, 70)]


@contextlib.contextmanager
def engine(folder, **settings):
    """vLLM with prompts in chunks of 16 tokens, cached in blocks of 32, with shared prefixes."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    llm = LLM(
        model=str(folder),
        **{
            "dtype": "float32",
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "max_model_len": 160,
            "max_num_batched_tokens": CHUNK,
            "max_num_seqs": 8,
            "block_size": BLOCK,
            "enable_prefix_caching": True,
            "disable_log_stats": True,
            **settings,
        },
    )
    try:
        yield llm
    finally:
        with contextlib.suppress(Exception):
            llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def answer(llm, rows, new=NEW, **settings):
    """Greedy answers: for each prompt, its tokens, their log-probabilities, and how many cached tokens it reused."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=new, logprobs=1, detokenize=False, ignore_eos=True, **settings)
    outputs = llm.generate([{"prompt_token_ids": row} for row in rows], sampling, use_tqdm=False)
    answers = []
    for output in outputs:
        tokens = list(output.outputs[0].token_ids)
        found = [step[token].logprob for step, token in zip(output.outputs[0].logprobs, tokens, strict=True)]
        answers.append((tokens, torch.tensor(found), output.num_cached_tokens))
    return answers


def force(llm, row):
    """Log-probabilities of a prompt's own tokens, without the first."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    output = llm.generate([{"prompt_token_ids": row}], sampling, use_tqdm=False)[0]
    steps = output.prompt_logprobs[1:]
    return torch.tensor([step[token].logprob for step, token in zip(steps, row[1:], strict=True)])


def greedy(model, row, new=NEW):
    """What `generate` answers."""
    tokens = torch.tensor([row])
    return model.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=new, do_sample=False, pad_token_id=0
    )[0, len(row) :].tolist()


@torch.no_grad()
def forced(model, row):
    """Log-probabilities of a row's own tokens in one call without a cache, without the first."""
    tokens = torch.tensor([row])
    scores = model(tokens, use_cache=False).logits.log_softmax(-1)
    return scores[0, :-1].gather(-1, tokens[0, 1:, None])[:, 0]


def switched_off(model):
    """The same weights without what makes positions depend on content, or without any encoding if nothing does."""
    names = ("encoding.carry", "encoding.mix_out", "encoding.move_gain", "encoding.decay.weight", "encoding.clock")
    found = [parameter for name, parameter in model.named_parameters() if name.endswith(names)]
    if found:
        with torch.no_grad():
            for parameter in found:
                parameter.zero_()
        return model
    shape = {name: getattr(model.config, name) for name in (*SIZES, "num_hidden_layers", "sliding_window")}
    plain = build("nope", dtype=torch.float32, **shape)
    plain.load_state_dict(model.state_dict(), strict=False)
    return plain
