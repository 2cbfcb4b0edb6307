"""generate_batch: many requests at once from a paged cache, with the tokens of `generate`."""

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from cases import CASES, build, draw_tokens

KINDS = [case for case in CASES if case not in ("rope-dynamic", "randpe-sampled")]
LENGTHS = (3, 11, 6, 17)
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
    rows = [torch.tensor([prompt]) for prompt in prompts]
    return [
        model.generate(row, attention_mask=torch.ones_like(row), max_new_tokens=NEW, do_sample=False, pad_token_id=0)[
            0, row.shape[1] :
        ].tolist()
        for row in rows
    ]


def draw_prompts():
    return [draw_tokens(1, length, seed=length)[0].tolist() for length in LENGTHS]


@pytest.mark.parametrize("case", KINDS)
def test_tokens_are_those_of_generate(case):
    model = build(case, dtype=torch.float32)
    prompts = draw_prompts()
    assert serve(model, prompts) == one_by_one(model, prompts)


@pytest.mark.parametrize(
    "shape",
    [
        {"num_loops": 2, "num_hidden_layers": 4},
        {"sliding_window": 5, "sliding_layers": [1]},
        {"sliding_window": 5},
        {"qk_norm": True, "attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 4},
    ],
    ids=lambda shape: "-".join(shape),
)
@pytest.mark.parametrize("case", ["tape2", "tape-clock", "t5"])
def test_other_shapes(case, shape):
    model = build(case, dtype=torch.float32, **shape)
    prompts = draw_prompts()
    assert serve(model, prompts) == one_by_one(model, prompts)


def test_eager_attention_and_shared_prefixes():
    """Prompts that start alike share the blocks of their start."""
    model = build("tape2", dtype=torch.float32)
    model.set_attn_implementation("eager")
    start = draw_tokens(1, 16)[0].tolist()
    prompts = [[*start, *prompt] for prompt in draw_prompts()]
    assert serve(model, prompts, max_batch_tokens=40) == one_by_one(model, prompts)
    assert model.config._attn_implementation == "eager"


def test_without_the_state_tokens_differ():
    """The tokens depend on what the cache carries: without it, the same weights give others."""
    model, prompts = build("tape", dtype=torch.float32), draw_prompts()
    expected = serve(model, prompts)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("encoding.carry"):
                parameter.zero_()
    assert serve(model, prompts) != expected


def test_the_cache_stores_nothing_twice():
    """Rows of TAPE's cache: three head dimensions in two rows."""
    from equitape.model.paged import row_width

    assert row_width(build("tape", head_dim=8).config) == 12
    assert row_width(build("rope", head_dim=8).config) == 8
    assert row_width(build("alibi", head_dim=8).config) == 16


def test_refusals():
    message = "Encoding 'rope' cannot use continuous batching .* changes its frequencies"
    with pytest.raises(ValueError, match=message):
        build("rope-dynamic").generate_batch([[5, 6, 7]])
    model = build("tape")
    model.set_attn_implementation("flex_attention")
    with pytest.raises(ValueError, match="needs attention 'sdpa' or 'eager', not 'flex_attention'"):
        model.generate_batch([[5, 6, 7]])


def test_paged_implementations_are_refused():
    for name in ("paged|eager", "paged|sdpa"):
        with pytest.raises(ValueError, match=r"'paged.* does not support encoding 'rope'"):
            build("rope").set_attn_implementation(name)
