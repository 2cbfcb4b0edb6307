"""CoPE: content-based positions; each query decides which keys to count (docs/reference/encodings/cope.md)."""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from ..settings import Ge
from .base import LayerEncoding, PositionalEncoding, register_encoding
from .options import Options
from .positions import Positions


@dataclass(frozen=True, kw_only=True)
class CoPEOptions(Options):
    """Options of CoPE."""

    num_positions: Annotated[int, Ge(2)] = 64
    """Positions 0 .. num_positions - 1 have embeddings; larger counts share the last one."""


class CoPELayer(LayerEncoding):
    """p_ij = sum_{t=j..i} sigmoid(scale q_i k_t); the score gains q_i e[p_ij], e linear between integers."""

    bias_copies = 17.0

    def __init__(self, options: CoPEOptions, head_dim: int):
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(head_dim, options.num_positions))

    def reset_parameters(self, std: float) -> None:
        nn.init.zeros_(self.embedding)

    def bias(
        self, query: Tensor, key: Tensor, state: Tensor | None, positions: Positions, key_ids: Tensor,
        visible: Tensor, scale: float,
    ) -> Tensor:  # fmt: skip
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        # counts reach thousands, where half precision has no fractions
        logits = (query @ key.transpose(-1, -2) * scale).to(torch.promote_types(query.dtype, torch.float32))
        gates = torch.sigmoid(logits).masked_fill(~visible, 0.0)
        count = gates.flip(-1).cumsum(-1).flip(-1)
        below = count.floor()
        weight = (count - below).to(query.dtype)
        last = self.embedding.shape[1] - 1
        counted = visible & (count < last)
        # other keys, most of a long row, read nothing here. A GPU serializes gradients to one index, so these keys are
        # spread over all indices
        spread = torch.arange(count.shape[-1], device=count.device) % last
        lower_index = torch.where(counted, below.long(), spread)
        # not scaled, as in the authors' listing: the table starts at zero and would take longer to have an effect
        at_integers = query @ self.embedding
        lower = at_integers.gather(-1, lower_index)
        upper = at_integers.gather(-1, lower_index + 1)
        return torch.where(counted, lower * (1 - weight) + upper * weight, at_integers[..., -1:])


@register_encoding("cope")
class CoPE(PositionalEncoding):
    """Depends only on the order of visible keys, not on ids."""

    reads_ids = False
    idea = "each query counts the keys it finds worth counting"
    options_class = CoPEOptions
    options: CoPEOptions
    backends = ("eager", "sdpa")
    adds_bias = True
    needs_causal = True

    def layer(self, index: int) -> LayerEncoding:
        return CoPELayer(self.options, self.geometry.head_dim)
