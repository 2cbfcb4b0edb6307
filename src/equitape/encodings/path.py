"""PaTH: a key is reflected by every token between it and the query (docs/reference/encodings/path.md).

score_ij = q_i^T H_i H_{i-1} ... H_{j+1} k_j,  H_t = I - beta_t w_t w_t^T, with w_t and beta_t made from the content.

The change of the scores is the bias of this encoding (kernels/reflections.py). Keys hold v_t = sqrt(beta_t) w_t in
extra columns, so any cache can be used.

Shapes: B batch, N tokens, K keys, H query heads, G key-value heads, D head dimension, C hidden size.
"""

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from .. import kernels
from ..settings import Ge
from .base import LayerEncoding, register_encoding
from .columns import ColumnsLayer
from .heads import Columns
from .nope import NoPE, NoPEOptions
from .options import Geometry
from .positions import Positions, run_starts
from .running import without_autocast

EPSILON = 1e-6


@dataclass(frozen=True, kw_only=True)
class PathOptions(NoPEOptions):
    """Options of PaTH. The defaults are the paper's; with `decay: gate` it is PaTH-FoX."""

    rank: Annotated[int, Ge(1)] = 32
    """Rank of the map from tokens to the directions w."""
    convolution: Annotated[int, Ge(1)] = 3
    """Number of tokens, the last one included, that a direction is made from."""

    def check(self, geometry: Geometry) -> None:
        self.check_decay("path", geometry)
        if self.decay_inside:
            raise ValueError("Encoding 'path' reflects all channels of a head; set decay_inside to false.")


def earlier_tokens(x: Tensor, positions: Positions, cached: Tensor | None, count: int) -> list[Tensor]:
    """x [B, G, N, D] of the token 1, 2, ..., `count` places before each one in its sequence; zeros before the first.

    cached: [B, G, N or 1, count, D], x of the last cached token and of those before it.
    """
    index = torch.arange(x.shape[2], device=x.device)[None]
    before = index - 1
    if positions.valid is not None:
        before = nn.functional.pad(torch.where(positions.valid, index, -1).cummax(-1).values[:, :-1], (1, 0), value=-1)
    if positions.segments is not None:
        first = torch.where(run_starts(positions.segments), index, 0).cummax(-1).values
        before = torch.where(before < first, -1, before)
    # a place of -1 is the last cached token, -2 the one before it
    place, found = index.expand_as(before), []
    for _ in range(count):
        place = torch.where(place < 0, place - 1, before.gather(-1, place.clamp(min=0)))
        rows = place[:, None, :, None].expand(*x.shape[:3], 1)
        here = x.gather(2, rows.clamp(min=0).expand_as(x)) * (rows >= 0)
        if cached is not None:
            held = cached.expand(-1, -1, x.shape[2], -1, -1)
            older = (-1 - rows).clamp(min=0)[..., None].expand(*x.shape[:3], 1, x.shape[3])
            here = torch.where(rows >= 0, here, held.gather(3, older)[..., 0, :])
        found.append(here)
    return found


def reflected_products(query: Tensor, key: Tensor, direction: Tensor, last: Tensor, scale: float = 1.0) -> Tensor:
    """scale q_i^T (H_i ... H_{j+1} - I) k_j for all queries and keys: [B, H, N, K] in the dtype of the query.

    query: [B, H, N, D]; key, direction: [B, G, K, D], with H_t = I - v_t v_t^T; last: [B or 1, N], index of each
    query's own token among the keys, which grows along the tokens. Numbers of later keys mean nothing.
    """
    wide = direction.to(torch.promote_types(direction.dtype, torch.float32))
    # |v|^2 is at most 2; if it were rounded up, products of many reflections would grow
    wide = wide * (wide.square().sum(-1, keepdim=True) / 2).clamp(min=1).rsqrt()
    return kernels.reflected_products(query, key, wide, last, scale)


class PathLayer(ColumnsLayer):
    """Key columns [v | u_t | u_{t-1} | ... | decay]: v, and what the directions of later tokens are made from."""

    bias_copies = 5.0

    def __init__(self, options: PathOptions, geometry: Geometry):
        super().__init__(options, geometry)
        groups, self.head_dim, self.size = geometry.num_kv_heads, geometry.head_dim, options.convolution
        self.keeps_sums = self.keeps_sums or self.size > 1
        self.down = nn.Linear(geometry.hidden_size, options.rank, bias=False)
        self.up = nn.Linear(options.rank, groups * self.head_dim, bias=False)
        self.taps = nn.Parameter(torch.empty(groups, self.head_dim, self.size))
        self.strength = nn.Parameter(torch.empty(groups, geometry.hidden_size))
        self.strength_bias = nn.Parameter(torch.empty(groups))

    def reset_parameters(self, std: float) -> None:
        super().reset_parameters(std)
        # as torch's convolutions
        nn.init.uniform_(self.taps, -1 / math.sqrt(self.size), 1 / math.sqrt(self.size))
        nn.init.normal_(self.strength, std=std)
        nn.init.zeros_(self.strength_bias)

    def columns(
        self, hidden: Tensor, positions: Positions, last_key: Tensor | None, dtype: torch.dtype, scale: float
    ) -> Columns:
        read = self.up(self.down(hidden)).unflatten(-1, (self.num_kv_heads, -1)).transpose(1, 2).to(dtype)
        cached = None
        if last_key is not None:
            cached = last_key[..., 2 * self.head_dim : (1 + self.size) * self.head_dim].unflatten(
                -1, (-1, self.head_dim)
            )
            cached = cached if cached.dim() == 5 else cached[:, :, None]
        seen = [read, *earlier_tokens(read, positions, cached, self.size - 1)]
        of_key = torch.cat((self._directions(hidden, seen, positions).to(dtype), *seen[:-1]), dim=-1)
        of_query = of_key.new_zeros(1, self.num_heads, 1, of_key.shape[-1])
        decay = super().columns(hidden, positions, last_key, dtype, scale)
        if decay is not None:
            of_query = torch.cat((of_query.expand(*decay.query.shape[:3], -1), decay.query), dim=-1)
            of_key = torch.cat((of_key, decay.key.expand(*of_key.shape[:3], -1)), dim=-1)
        return Columns(of_query, of_key)

    def _directions(self, hidden: Tensor, seen: list[Tensor], positions: Positions) -> Tensor:
        """v [B, G, N, D], zero for padding. seen: what is read of each token, and of those before it."""
        wide = torch.promote_types(hidden.dtype, torch.float32)
        with without_autocast(hidden.device):
            taps = self.taps.to(wide).flip(-1).unbind(-1)
            mixed = torch.stack([x.to(wide) * tap[:, None] for x, tap in zip(seen, taps, strict=True)]).sum(0)
            direction = nn.functional.silu(mixed)
            strength = nn.functional.linear(hidden.to(wide), self.strength.to(wide), self.strength_bias.to(wide))
            strength = 2 * strength.sigmoid().transpose(1, 2)[..., None]
            direction = direction * (strength / (direction.square().sum(-1, keepdim=True) + EPSILON)).sqrt()
        return direction if positions.valid is None else direction * positions.valid[:, None, :, None]

    def bias(
        self, query: Tensor, key: Tensor, state: Tensor | None, positions: Positions, key_ids: Tensor,
        visible: Tensor, scale: float,
    ) -> Tensor:  # fmt: skip
        content, direction = key[..., : 2 * self.head_dim].chunk(2, dim=-1)
        index = torch.arange(key.shape[2], device=key.device)
        last = torch.where(visible, index, -1).amax((1, -1))
        return reflected_products(query[..., : self.head_dim], content, direction, last, scale)


@register_encoding("path")
class Path(NoPE):
    """Depends only on the content and order of visible keys, not on ids, unless a decay does."""

    idea = "keys are reflected by all tokens between them and the query"
    options_class = PathOptions
    options: PathOptions
    backends = ("eager", "sdpa")
    adds_bias = True

    def __init__(self, options: PathOptions, geometry: Geometry):
        super().__init__(options, geometry)
        self.needs_causal = True
        self.keeps_sums = self.keeps_sums or options.convolution > 1
        # directions: products of many reflections add up their rounding
        self.keeps_numbers = True

    @property
    def key_columns(self) -> list[int]:
        own = self.options.convolution * self.geometry.head_dim
        return [own + columns for columns in super().key_columns]

    def layer(self, index: int) -> LayerEncoding:
        return PathLayer(self.options, self.geometry)
