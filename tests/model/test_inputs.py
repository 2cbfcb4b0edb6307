"""Bad input gets one clear sentence, before any work."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask
from transformers import DynamicCache

from cases import build, draw_tokens, tiny_config
from equitape import EquitapeConfig, EquitapeForCausalLM
from equitape.encodings import Positions
from equitape.nn.core import AttentionMask, attend

TOKENS = draw_tokens(2, 6)


def refused(message, **inputs):
    with pytest.raises(ValueError, match=message):
        build("tape")(**inputs)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"encoding": {"kind": "tap"}}, r"Unknown encoding 'tap'. Did you mean 'tape'\? Allowed: alibi, cope"),
        ({"encoding": "ropee"}, "Did you mean 'rope'"),
        ({"encoding": {"theta": 3.0}}, "has no kind"),
        ({"encoding": {"kind": "rope", "teta": 3.0}}, "Encoding 'rope' has no option 'teta'. Did you mean 'theta'"),
        ({"encoding": {"kind": "nope", "teta": 3.0}}, "Encoding 'nope' has no option 'teta'"),
        ({"encoding": {"kind": "rope", "scaling": {"kind": "yarn", "faktor": 2.0}}}, "no option 'faktor'. Did you mean 'factor'"),
        ({"encoding": {"kind": "rope", "theta": -2.0}}, "theta is -2.0; it must be a number above 1"),
        ({"head_dim": 7, "encoding": "tape"}, "head_dim must be even; it is 7"),
        ({"head_dim": 2, "encoding": {"kind": "rope", "scaling": {"kind": "ntk", "factor": 2.0}}}, "head_dim above 2"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "4 is not a multiple of num_key_value_heads 3"),
        ({"hidden_size": 30}, "hidden_size 30 is not a multiple of num_attention_heads 4"),
        ({"num_hidden_layers": 3, "num_loops": 2}, "must be a multiple of num_loops"),
        ({"sliding_layers": [1]}, "needs sliding_window; set how many keys"),
        ({"sliding_layers": [9], "sliding_window": 4}, r"sliding_layers has \[9\]"),
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"num_loops": 0}, "num_loops is 0"),
        ({"num_hidden_layer": 4}, "no field 'num_hidden_layer'. Did you mean 'num_hidden_layers'"),
        ({"hidden_size": 33, "num_attention_heads": 3, "num_key_value_heads": 3, "encoding": "sinusoidal"}, "even hidden_size"),
        ({"encoding": {"kind": "t5", "max_distance": 2}}, "max_distance above"),
        ({"encoding": {"kind": "fire", "width": 0}}, "width is 0; it must be a whole number of 1 or more"),
        ({"encoding": {"kind": "cope", "num_positions": 1}}, "num_positions is 1; it must be a whole number of 2 or more"),
        ({"encoding": {"kind": "learned", "num_positions": 0}}, "num_positions is 0; it must be a whole number of 1 or more"),
        ({"encoding": {"kind": "xpos", "gamma": 0.0}}, "above 0"),
        ({"encoding": {"kind": "randpe", "range": 0}}, "range is 0; it must be a whole number of 1 or more"),
        ({"encoding": {"kind": "tensor_tape", "mixer_size": 0}}, "mixer_size is 0; it must be a whole number of 1 or more"),
    ],
)  # fmt: skip
def test_configurations(changes, message):
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 3}
    with pytest.raises(ValueError, match=message):
        EquitapeConfig(**{**sizes, **changes})


def test_tokens_or_embeddings():
    refused("exactly one of input_ids and inputs_embeds; neither was given")
    refused("both was given", input_ids=TOKENS, inputs_embeds=torch.zeros(2, 6, 32))


def test_position_ids():
    refused(
        r"position_ids has shape \[2, 5\]; it must be \[2, 6\]", input_ids=TOKENS, position_ids=torch.zeros(2, 5).long()
    )
    refused(r"shape \[6\]", input_ids=TOKENS, position_ids=torch.arange(6))
    refused("position_ids contains -3; ids start at 0", input_ids=TOKENS, position_ids=torch.arange(6)[None] - 3)
    refused("must be integer, use", input_ids=TOKENS, position_ids=torch.arange(6.0)[None])


def test_masks():
    refused(
        r"attention_mask has shape \[2, 5\]; it must be \[2, 6\]", input_ids=TOKENS, attention_mask=torch.ones(2, 5)
    )
    refused(r"shape \[6\]", input_ids=TOKENS, attention_mask=torch.ones(6))
    refused(r"a 4D mask must be \[2, 1, 6, keys\]", input_ids=TOKENS, attention_mask=torch.ones(2, 1, 5, 5))
    refused(
        "do not pass segment_ids",
        input_ids=TOKENS,
        attention_mask=torch.ones(2, 1, 6, 6),
        segment_ids=torch.zeros(2, 6),
    )


def test_masks_with_a_cache():
    model = build("tape")
    cache = DynamicCache(config=model.config)
    model(TOKENS, past_key_values=cache)
    with pytest.raises(ValueError, match=r"it must be \[2, 7\], the 6 cached tokens included"):
        model(TOKENS[:, :1], past_key_values=cache, attention_mask=torch.ones(2, 1))


def test_segments():
    refused(r"segment_ids has shape \[2, 5\]", input_ids=TOKENS, segment_ids=torch.zeros(2, 5).long())
    model = build("tape")
    with pytest.raises(ValueError, match="which a cache cannot continue"):
        model(TOKENS, segment_ids=torch.zeros_like(TOKENS), past_key_values=DynamicCache(config=model.config))


@pytest.mark.parametrize(
    ("case", "implementation"),
    [("cope", "flex_attention"), ("path", "flex_attention"), ("tape", "flash_attention_2")],
)
def test_backend_that_cannot_serve_the_encoding(case, implementation):
    message = (
        f"Attention implementation '{implementation}' does not support encoding '{case}'; use one of 'eager', 'sdpa'"
    )
    with pytest.raises(ValueError, match=message):
        EquitapeForCausalLM._from_config(tiny_config(case), attn_implementation=implementation)
    model = build(case)
    with pytest.raises(ValueError, match=message):
        model.set_attn_implementation(implementation)
    assert model.config._attn_implementation == "sdpa"


def test_dropout_with_flex_attention():
    attention = build("rope", attention_dropout=0.1).model.layers[0].self_attn.train()
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 6, 6, device="cpu")
    heads = torch.zeros(2, 4, 6, 8)
    with pytest.raises(ValueError, match="does not support dropout"):
        attend(attention, heads, heads, heads, None, Positions(torch.arange(6)[None]), AttentionMask(mask, None), 1.0)
