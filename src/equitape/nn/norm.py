"""The root-mean-square norm of the decoder, and of queries and keys."""

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed in float32. offset: added to the weight, as in Gemma."""

    def __init__(self, size: int, eps: float, offset: float = 0.0):
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), 1.0 - offset))
        self.eps, self.offset = eps, offset

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        if self.offset:
            return (wide * (self.offset + self.weight.to(wide.dtype))).to(x.dtype)
        return self.weight * wide.to(x.dtype)
