"""Rotary tables against transformers' own, and the properties that make them what they are."""

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from equitape.encodings.frequencies import Scaling, inverse_frequencies, softmax_scale
from equitape.encodings.phasors import multiply, phasors

CPU = torch.device("cpu")
DIM = 64
# our options, transformers' parameters
PAIRS = {
    "default": ({}, {"rope_type": "default", "rope_theta": 10000.0}),
    "linear": (
        {"kind": "linear", "factor": 4.0},
        {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    ),
    "yarn": (
        {"kind": "yarn", "factor": 8.0, "original_max_positions": 256},
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256, "rope_theta": 10000.0},
    ),
    # the ramp ends beyond the last frequency
    "yarn-long": (
        {"kind": "yarn", "factor": 8.0, "original_max_positions": 131072},
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 131072, "rope_theta": 10000.0},
    ),
    "yarn-untruncated": (
        {"kind": "yarn", "factor": 3.0, "original_max_positions": 300, "truncate": False, "beta_fast": 20.0},
        {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 300, "truncate": False,
         "beta_fast": 20.0, "rope_theta": 10000.0},
    ),
    "yarn-mscale": (
        {"kind": "yarn", "factor": 40.0, "original_max_positions": 256, "mscale": 1.0, "mscale_all_dim": 0.5},
        {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 256, "mscale": 1.0,
         "mscale_all_dim": 0.5, "rope_theta": 10000.0},
    ),
    "llama3": (
        {"kind": "llama3", "factor": 8.0, "original_max_positions": 512, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 512, "low_freq_factor": 1.0,
         "high_freq_factor": 4.0, "rope_theta": 10000.0},
    ),
}  # fmt: skip


def theirs(parameters, max_positions=2048):
    config = LlamaConfig(
        hidden_size=4 * DIM, num_attention_heads=4, max_position_embeddings=max_positions, rope_parameters=parameters
    )
    return LlamaRotaryEmbedding(config)


@pytest.mark.parametrize("name", PAIRS)
def test_same_frequencies_as_transformers(name):
    options, parameters = PAIRS[name]
    scaling = Scaling(**options)
    rotary = theirs(parameters)
    ours = inverse_frequencies(DIM, 10000.0, scaling, CPU)
    assert ours.dtype == torch.float64
    # theirs are float32, ours float64, but for llama3's, which have theirs digit by digit
    torch.testing.assert_close(ours, rotary.inv_freq.double(), rtol=0 if name == "llama3" else 2e-6, atol=0)
    assert softmax_scale(scaling) == pytest.approx(rotary.attention_scaling**2, rel=1e-12)


@pytest.mark.parametrize("length", [100, 256, 257, 1000])
def test_dynamic_ntk_as_transformers_at_every_length(length):
    rotary = theirs({"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}, max_positions=256)
    ids = torch.arange(length)[None]
    cos, _ = rotary(torch.zeros(1), ids)
    scaling = Scaling(kind="dynamic", factor=2.0, original_max_positions=256)
    span = torch.tensor([[length]])
    ours = phasors(ids, inverse_frequencies(DIM, 10000.0, scaling, CPU, span), torch.float64)
    # theirs multiplies in float32, which at an angle of 1000 leaves an error of 1e-4
    torch.testing.assert_close(ours[0, 0, :, : DIM // 2].float(), cos[0, :, : DIM // 2], rtol=0, atol=2e-4)


def test_theta_and_ntk_change_the_base():
    plain = inverse_frequencies(DIM, 5e5, Scaling(), CPU)
    torch.testing.assert_close(inverse_frequencies(DIM, 1e4, Scaling(kind="theta", theta=5e5), CPU), plain)
    ntk = inverse_frequencies(DIM, 1e4, Scaling(kind="ntk", factor=4.0), CPU)
    # the fastest frequency stays, the slowest is interpolated by the whole factor
    assert ntk[0] == 1.0
    default = inverse_frequencies(DIM, 1e4, Scaling(), CPU)
    assert (default[-1] / ntk[-1]).item() == pytest.approx(4.0)


def test_yarn_keeps_fast_frequencies_and_interpolates_slow_ones():
    plain = inverse_frequencies(DIM, 1e4, Scaling(), CPU)
    yarn = inverse_frequencies(DIM, 1e4, Scaling(kind="yarn", factor=8.0, original_max_positions=4096), CPU)
    assert yarn[0] == plain[0]
    assert (plain[-1] / yarn[-1]).item() == pytest.approx(8.0)


def test_angles_are_exact_far_out():
    """In float32 the angle of the fastest frequency at a million would be off by 0.03."""
    frequencies = inverse_frequencies(DIM, 10000.0, Scaling(), CPU)
    field = phasors(torch.tensor([[1_000_003]]), frequencies, torch.float32)
    expected = [math.cos(1_000_003 * 10000.0 ** (-2 * m / DIM)) for m in range(DIM // 2)]
    torch.testing.assert_close(field[0, 0, 0, : DIM // 2].double(), torch.tensor(expected).double(), rtol=0, atol=1e-6)


def test_multiply_is_the_complex_product():
    x, z = torch.randn(2, 4, 3, 8, dtype=torch.float64), torch.randn(2, 2, 3, 8, dtype=torch.float64)
    product = torch.complex(*x.chunk(2, -1)) * torch.complex(*z.repeat_interleave(2, 1).chunk(2, -1))
    torch.testing.assert_close(multiply(x, z), torch.cat((product.real, product.imag), -1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "yarm"}, "Did you mean 'yarn'"),
        ({"kind": "linear", "factor": 0.5}, "must be a number of 1 or more"),
        ({"kind": "yarn", "factor": 2.0}, "original_max_positions"),
        ({"kind": "theta"}, "the new base"),
        ({"kind": "llama3", "original_max_positions": 8, "high_freq_factor": 1.0}, "high_freq_factor"),
    ],
)
def test_bad_scaling(options, message):
    with pytest.raises(ValueError, match=message):
        Scaling(**options)
