"""What only a GPU does: shifted groups by block masks with their gradients, and bfloat16 runs through the fused kernels."""

import pytest
import torch

from cases import draw_tokens, gap
from equitape import adapt
from families import make_source

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

SHAPE = {"hidden_size": 144, "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 2048}


@pytest.mark.parametrize("segments", [False, True])
def test_longlora_by_block_masks_is_longlora_by_dense_ones(segments):
    """Rows of 640 tokens go through FlexAttention on CUDA; the same weights and tokens on the CPU do not."""
    tokens = draw_tokens(2, 640)
    inputs = {"labels": tokens}
    if segments:
        inputs["segment_ids"] = (torch.arange(640) // 250).expand(2, -1)
    found = []
    for device in ("cpu", "cuda"):
        model = adapt(make_source(**SHAPE), "longlora", context=640).to(device).train()
        loss = model(tokens.to(device), **{name: value.to(device) for name, value in inputs.items()}).loss
        loss.backward()
        gradients = {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}
        found.append((loss.item(), gradients))
    (expected, theirs), (loss, ours) = found
    assert loss == pytest.approx(expected, rel=1e-4)
    assert ours.keys() == theirs.keys()
    for name in ours:
        # float32 on both sides, but matrix products on CUDA may round to TF32
        assert gap(ours[name], theirs[name]) < 2e-2 * theirs[name].abs().max() + 1e-6, name


@pytest.mark.parametrize("method", ["tape", "tape+lora", "longlora"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_frozen_in_bfloat16_trained_in_float32(method, checkpointed):
    """As a fine-tuning run holds them: under autocast gradients arrive at all that trains, in float32, and are numbers."""
    from equitape.adapt.finetune import widen_trained

    model = adapt(make_source(dtype=torch.bfloat16, **SHAPE), method, context=1024).to("cuda").train()
    widen_trained(model)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    tokens = draw_tokens(2, 1024).to("cuda")
    losses = []
    for _ in range(5):
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(tokens, labels=tokens).loss
        loss.backward()
        for name, parameter in model.named_parameters():
            assert (parameter.grad is not None) == parameter.requires_grad, name
            if parameter.grad is not None:
                assert parameter.grad.dtype == torch.float32
                assert parameter.grad.isfinite().all(), name
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
