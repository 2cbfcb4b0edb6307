"""TAPE in the layout of the paper's code, as a baseline: the same function of the same weights, with more work.

The position state is a cosine and a sine tensor of full head width, with every number stored twice. Three attention
calls share queries and keys, with values v, cos and sin. A linear layer over heads follows. The position feed-forward
layer maps each token's state up to I channels and down again.

Shapes: B batch, N tokens, H query heads, G key-value heads (the paper has G = H), D head dimension, I mixer size.
"""

import torch
from torch import Tensor, nn

from ..encodings.tape import TapeLayer
from ..nn.backends import cuda_attention
from .parts import AttentionPart


def split_state(state: Tensor) -> tuple[Tensor, Tensor]:
    """Convert our half-split field [B, G, N, D] to cosine and sine, [B, G, N, D] each."""
    real, imaginary = state.chunk(2, dim=-1)
    return torch.cat((real, real), dim=-1), torch.cat((imaginary, imaginary), dim=-1)


def join_state(cos: Tensor, sin: Tensor) -> Tensor:
    """Convert cosine and sine to the field, [B, G, N, D]."""
    half = cos.shape[-1] // 2
    return torch.cat((cos[..., :half], sin[..., :half]), dim=-1)


def join_gradient(cos: Tensor, sin: Tensor) -> Tensor:
    """The gradient of a field from those of its cosine and sine, which hold it twice; [B, G, N, D]."""
    return torch.cat([first + second for first, second in (cos.chunk(2, -1), sin.chunk(2, -1))], dim=-1)


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x cos + rotate_half(x) sin, for x [B, H, N, D] and a state with as many heads or fewer."""
    ratio = x.shape[1] // cos.shape[1]
    if ratio > 1:
        cos, sin = cos.repeat_interleave(ratio, dim=1), sin.repeat_interleave(ratio, dim=1)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def attend(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """Causal attention [B, H, N, D], with the same kernels as our layout."""
    if query.is_cuda:
        return cuda_attention(query, key, value, None, 0.0, scaling).transpose(1, 2)
    grouped = query.shape[1] != key.shape[1]
    return nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped
    )


class PaperLayout(nn.Module):
    """(hidden, cos, sin) -> (attended, cos, sin), with the weights of a layer part that updates a field."""

    def __init__(self, part: AttentionPart):
        super().__init__()
        self.part = part
        layer = part.attention.encoding
        if not isinstance(layer, TapeLayer) or layer.options.normalize or layer.options.complex_mixing:
            raise ValueError("The paper's layout needs encoding 'tape' with default options.")
        self.layer = layer

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """hidden: [B, N, C]; cos, sin: [B, G, N, D]."""
        attention = self.part.attention
        shape = (*hidden.shape[:-1], -1, attention.head_dim)
        query, key, value = (
            project(hidden).view(shape).transpose(1, 2)
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        query, key = turn(query, cos, sin), turn(key, cos, sin)
        output, attended_cos, attended_sin = (
            attend(query, key, columns, self.part.scaling) for columns in (value, cos, sin)
        )
        attended = self.part.finish(hidden, attention.o_proj(output.transpose(1, 2).flatten(2)))
        gate = nn.functional.silu(self.layer.gate(attended)).transpose(1, 2)[..., None]
        return attended, self._update(cos, attended_cos, gate), self._update(sin, attended_sin, gate)

    def _update(self, state: Tensor, attended_state: Tensor, gate: Tensor) -> Tensor:
        """state: [B, G, N, D]; attended_state: [B, H, N, D]; gate: [B, I, N, 1]."""
        state = state + torch.einsum("gh,bhnd->bgnd", self.layer.carry, attended_state)
        up = torch.einsum("ig,bgnd->bind", self.layer.mix_in, state)
        return state + torch.einsum("gi,bind->bgnd", self.layer.mix_out, gate * up)
