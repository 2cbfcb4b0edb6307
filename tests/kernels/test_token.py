"""The update of a single token with its gates in one kernel, as decoding has it, against the plain steps."""

import pytest
import torch
from accelerate import cpu_offload
from devices import DEVICES, needs_triton
from fields import SLACK, cast, make_inputs

from cases import randomise
from equitape import EquitapeConfig, EquitapeForCausalLM
from equitape.encodings import tape
from equitape.kernels import fuses_token, reference, update_token
from equitape.kernels.operator import fused_token_update

pytestmark = needs_triton
SIZES = [
    {"groups": 1, "heads": 1, "width": 3},
    {"groups": 3, "heads": 9, "dim": 64, "width": 576},
    {"groups": 5, "heads": 15, "dim": 40, "gates": 21, "width": 100},
    {"groups": 12, "heads": 12, "dim": 64, "width": 768},
]


def token_inputs(width: int = 48, **sizes):
    """In float64: field, attended, features, gate_weight, carry, mix_in, mix_out."""
    inputs = make_inputs(tokens=1, **sizes)
    generator = torch.Generator().manual_seed(3)
    batch, gates = inputs["field"].shape[0], inputs["mix_in"].shape[-2]
    features = torch.randn(batch, 1, width, generator=generator).bfloat16().double()
    weight = (torch.randn(gates, width, generator=generator) * width**-0.5).bfloat16().double()
    return [inputs["field"], inputs["attended"], features, weight, *(inputs[n] for n in ("carry", "mix_in", "mix_out"))]


def plainly(field, attended, features, gate_weight, *weights):
    *weights, normalize = weights
    return reference.update_field(field, attended, features @ gate_weight.T, *weights, normalize)


def moved(inputs, device, dtype):
    return [None if x is None else cast(x, device, dtype).detach() for x in inputs]


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: "-".join(f"{name}{size}" for name, size in sizes.items()))
@pytest.mark.parametrize("device", DEVICES)
def test_twice_rule(device, sizes, dtype, parts, normalize):
    inputs = token_inputs(**sizes, batch=3, parts=parts)
    exact = plainly(*inputs, normalize)
    with torch.no_grad():
        plain = plainly(*moved(inputs, device, dtype), normalize).cpu().double()
        fused = fused_token_update(*moved(inputs, device, dtype), normalize)
    assert fused.dtype == dtype
    error, plain_error = (fused.cpu().double() - exact).norm(), (plain - exact).norm()
    assert error <= 2 * plain_error + SLACK[dtype] * exact.norm(), f"{error}, plain PyTorch {plain_error}"


@pytest.mark.parametrize("device", DEVICES)
def test_without_carrying_and_with_a_field_shared_by_the_batch(device):
    inputs = token_inputs(batch=3)
    inputs[0] = inputs[0][:1].clone()
    for given in (inputs, [inputs[0], None, *inputs[2:4], None, *inputs[5:]]):
        given = moved(given, device, torch.float32)
        with torch.no_grad():
            torch.testing.assert_close(update_token(*given), plainly(*given, False))


@pytest.mark.parametrize("device", DEVICES)
def test_strided(device):
    field, attended, features, weight, carry, mix_in, mix_out = moved(token_inputs(), device, torch.float32)
    odd = [
        field.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
        attended,
        features.repeat_interleave(2, dim=-1)[..., ::2],
        weight.T.contiguous().T,
        carry.T.contiguous().T,
        mix_in,
        mix_out,
    ]
    with torch.no_grad():
        torch.testing.assert_close(
            update_token(*odd), plainly(field, attended, features, weight, carry, mix_in, mix_out, False)
        )


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device, parts):
    torch.library.opcheck(fused_token_update, (*moved(token_inputs(parts=parts), device, torch.float32), True))


@pytest.mark.parametrize("device", DEVICES)
def test_when_it_is_taken(device, monkeypatch):
    field, _, features, weight, *_ = moved(token_inputs(), device, torch.float32)
    assert not fuses_token(field, features, weight)  # gradients could be asked for
    with torch.no_grad():
        assert fuses_token(field, features, weight)
        assert not fuses_token(field, features.expand(-1, 2, -1), weight)
        assert not fuses_token(field, features, weight.bfloat16())
        assert not fuses_token(field, features, weight.new_empty(12, 8192))
        with torch.autocast(device, torch.bfloat16):
            assert not fuses_token(field, features, weight)
        monkeypatch.setenv("EQUITAPE_KERNELS", "reference")
        assert not fuses_token(field, features, weight)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_a_decoding_model_takes_it(device, compiled, monkeypatch):
    """Logits of cached tokens are those of one call over all of them, which takes the other kernel."""
    config = EquitapeConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2,
        encoding="tape",
    )  # fmt: skip
    model = EquitapeForCausalLM(config).eval().to(device)
    randomise(model)
    tokens = torch.randint(50, (2, 6), device=device)
    taken = []

    def counted(*given, **named):
        taken.append(given[2].shape)
        return update_token(*given, **named)

    monkeypatch.setattr(tape, "update_token", counted)
    step = torch.compile(model, backend="aot_eager") if compiled else model
    with torch.no_grad():
        whole = model(tokens).logits
        assert not taken
        cache = model(tokens[:, :5], use_cache=True).past_key_values
        last = step(tokens[:, 5:], past_key_values=cache).logits
    # the last of three layers updates nothing
    assert taken == [(2, 1, 32)] * 2
    torch.testing.assert_close(last[:, 0], whole[:, 5])


@pytest.mark.parametrize("device", DEVICES)
def test_a_model_with_offloaded_weights_decodes(device):
    """The gates' weights are there only while their module runs."""
    config = EquitapeConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2,
        encoding="tape",
    )  # fmt: skip
    model = EquitapeForCausalLM(config).eval()
    randomise(model)
    tokens = torch.randint(50, (2, 6), device=device)
    with torch.no_grad():
        whole = model.to(device)(tokens).logits
        cpu_offload(model.cpu(), execution_device=torch.device(device))
        cache = model(tokens[:, :5], use_cache=True).past_key_values
        last = model(tokens[:, 5:], past_key_values=cache).logits
    torch.testing.assert_close(last[:, 0].to(device), whole[:, 5])
