"""The norm of the decoder against its formula."""

import torch

from equitape.nn.norm import RMSNorm


def test_half_precision_is_widened_before_it_is_squared():
    """The square of 300 is more than float16 holds: with an infinite mean, everything would become zero."""
    x = 300 * torch.randn(3, 64)
    norm = RMSNorm(64, 1e-6)
    torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    norm, x = norm.half(), x.half()
    found = norm(x)
    assert found.dtype == torch.float16
    for row, ours in zip(x.double(), found, strict=True):
        root = (sum(value**2 for value in row) / 64 + 1e-6) ** 0.5
        # rounded after the division and after the product, by 2**-11 at most each time
        torch.testing.assert_close(ours.double(), row / root * norm.weight.double(), rtol=2**-10, atol=0)
