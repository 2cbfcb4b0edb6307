"""What a training step keeps for its backward pass on a GPU, where attention keeps queries, keys and values as they are."""

import pytest
import torch

from cases import build, draw_tokens
from equitape.encodings.phasors import multiply
from equitape.encodings.tape import TapeLayer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def kept_bytes(model, tokens):
    """Bytes of all storages that autograd keeps of one forward, each counted once, parameters not at all."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(tokens, use_cache=False).logits.sum()
    return sum(storage.nbytes() for storage in storages.values())


@pytest.fixture
def trained():
    # of a width that cuDNN takes, and as many key-value heads as heads, since a plain product repeats them
    sizes = {"num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4}
    model = build("tape", attn_implementation="sdpa", dtype=torch.bfloat16, **sizes).cuda().train()
    return model, draw_tokens(2, 64).cuda()


def test_queries_and_keys_are_kept_once(trained, monkeypatch):
    """Turned queries and keys are all that attention and its rotation keep of them."""
    model, tokens = trained
    lean = kept_bytes(model, tokens)
    monkeypatch.setattr(
        "equitape.encodings.tape.apply_rotary", lambda query, key, field: (multiply(query, field), multiply(key, field))
    )
    heads = model.config.num_attention_heads + model.config.num_key_value_heads
    # the field of the first block needs no gradient
    blocks = model.config.num_hidden_layers - 1
    assert kept_bytes(model, tokens) - lean == blocks * heads * tokens.numel() * model.config.head_dim * 2


def test_the_field_is_kept_once(trained, monkeypatch):
    """The widened value holds the field already."""
    model, tokens = trained
    lean = kept_bytes(model, tokens)
    # a copy is not known to be the state, so rotation and update keep the state in addition to the widened value
    monkeypatch.setattr(TapeLayer, "extra_values", lambda layer, state: state.clone() if layer.carries else None)
    # neither the first block, whose field needs no gradient, nor the last, which widens nothing
    blocks = model.config.num_hidden_layers - 2
    field = tokens.numel() * model.config.num_key_value_heads * model.config.head_dim * 2
    assert kept_bytes(model, tokens) - lean == blocks * field
