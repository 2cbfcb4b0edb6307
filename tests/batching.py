"""Requests through `generate_batch`, and the same one by one through `generate`."""

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from cases import draw_tokens

LENGTHS = (3, 11, 17)
NEW = 6


def serve(model, prompts, max_batch_tokens=12, **settings):
    """Rows of at most `max_batch_tokens` tokens: longer prompts arrive in chunks, with tokens of other requests."""
    outputs = model.generate_batch(
        prompts,
        generation_config=GenerationConfig(max_new_tokens=NEW, eos_token_id=-1, do_sample=False),
        continuous_batching_config=ContinuousBatchingConfig(
            max_batch_tokens=max_batch_tokens, num_blocks=16, **{page_name(): 8, **settings}
        ),
    )
    assert all(output.error is None for output in outputs.values()), [output.error for output in outputs.values()]
    return [output.generated_tokens for output in outputs.values()]


def page_name():
    """transformers 5.22 renamed the setting."""
    return "page_size" if hasattr(ContinuousBatchingConfig(), "page_size") else "block_size"


def one_by_one(model, prompts):
    model.generation_config.eos_token_id = None
    rows = [torch.tensor([prompt], device=model.device) for prompt in prompts]
    return [
        model.generate(row, attention_mask=torch.ones_like(row), max_new_tokens=NEW, do_sample=False, pad_token_id=0)[
            0, row.shape[1] :
        ].tolist()
        for row in rows
    ]


def draw_prompts():
    return [draw_tokens(1, length, seed=length)[0].tolist() for length in LENGTHS]
