"""Running sums in vLLM's paged cache, through nothing but its attention layers.

A forget gate and a clock continue a sum from the last cached token of a request. vLLM does not show cached keys, but
attention can read them: a layer whose score grows by 32 with every position gives all its weight to the newest key, so
its output is the value of that key, exactly, in every dtype and on every backend.

1. read   new tokens write a key of zeros (score 0), so that the newest other key wins: the last cached token. Its value
          holds the sums and its position; without one, all values are zero.
2. write  new tokens write their position as key and their sums as value. Each now wins its own row, so that the output
          is what was written: callers go on with the output, which keeps compilers from dropping the write.

Shapes: N tokens, H and G query and key-value heads of this rank, W width of the cache's rows, E columns.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

BASE = 128
"""Positions are three digits in this base: bfloat16 holds each exactly."""
DIGITS = 3
LONGEST = BASE**DIGITS - 1
"""Tokens of the longest sequence: positions are stored as counts from 1."""
STEEPNESS = 32.0
"""Scores differ by this per position: others get a weight of exp(-32), 1e-14."""


def digits(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """[N] int64 -> [N, 3]: digits in base 128, the highest first."""
    return torch.stack([numbers // BASE**power % BASE for power in reversed(range(DIGITS))], dim=-1).to(dtype)


def number(digits: Tensor) -> Tensor:
    """The inverse of `digits`: [N, 3] -> [N] int64."""
    high, middle, low = digits.float().round().long().unbind(-1)
    return (high * BASE + middle) * BASE + low


class Sums(nn.Module):
    """The running sums of one block application. attention: a vLLM attention layer of scale `STEEPNESS`, without a
    window.
    """

    def __init__(self, attention: nn.Module, heads: int, groups: int, width: int, columns: int):
        super().__init__()
        self.attention = attention
        self.heads, self.groups, self.width, self.columns = heads, groups, width, columns

    def read(self, ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Sums of the last cached token of each token's request, [N, G, E], and the id of its first new token, [N]."""
        nothing = torch.zeros(ids.shape[0], self.groups * self.width, dtype=dtype, device=ids.device)
        found = self._attend(ids, nothing, nothing)
        return found[..., : self.columns], number(found[:, 0, self.columns : self.columns + DIGITS])

    def write(self, ids: Tensor, sums: Tensor) -> Tensor:
        """Store the sums [N, G, E] of new tokens; returns them."""
        place = digits(ids + 1, sums.dtype)[:, None].expand(-1, self.groups, -1)
        key = pad(place, (0, self.width - DIGITS)).flatten(1)
        value = pad(torch.cat((sums, place), dim=-1), (0, self.width - self.columns - DIGITS)).flatten(1)
        return self._attend(ids, key, value)[..., : self.columns]

    def _attend(self, ids: Tensor, key: Tensor, value: Tensor) -> Tensor:
        powers = [float(BASE**power) for power in reversed(range(DIGITS))]
        query = torch.tensor(powers, dtype=key.dtype, device=key.device)
        query = pad(query, (0, self.width - DIGITS)).expand(ids.shape[0], self.heads, -1).reshape(ids.shape[0], -1)
        output = self.attention(query, key, value).unflatten(-1, (self.heads, self.width))
        # query heads of a group read the same
        return output[:, :: self.heads // self.groups]
