"""Rows that are split over processes: who holds which tokens, and sums over the tokens of other processes.

Of c processes, process r holds pieces r and 2c - 1 - r of the 2c equal pieces of a row, as torch's context_parallel
deals them: every process then has the same share of causal attention. Pieces of one process are in order.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

PIECES = 2
"""Pieces of a row that each process holds."""


@dataclass(frozen=True, eq=False)
class Shards:
    """How the rows of a call are split over the processes of a group."""

    group: Any
    """A process group of torch.distributed."""

    @property
    def size(self) -> int:
        """Number of processes."""
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def own(self) -> tuple[int, int]:
        """The pieces of this process."""
        return self.rank, 2 * self.size - 1 - self.rank

    def check_length(self, length: int) -> None:
        """Raise ValueError for rows that cannot be split evenly."""
        if length % (PIECES * self.size):
            raise ValueError(
                f"Rows of {length:,} tokens cannot be split over {self.size} processes with two equal pieces each; use "
                f"a length that is a multiple of {PIECES * self.size}."
            )

    def split(self, rows: Tensor, dim: int = 1) -> Tensor:
        """The part of this process of whole rows."""
        self.check_length(rows.shape[dim])
        pieces = rows.chunk(PIECES * self.size, dim=dim)
        return torch.cat([pieces[index] for index in self.own], dim=dim)

    def join(self, part: Tensor, dim: int = 1) -> Tensor:
        """Whole rows from the parts of all processes, without gradients."""
        halves = [half.movedim(dim, 0) for half in part.chunk(PIECES, dim=dim)]
        gathered = self._in_order(torch.stack(halves).contiguous())
        return torch.cat(list(gathered)).movedim(0, dim)

    def places(self, num_tokens: int, device: torch.device) -> Tensor:
        """Where the tokens of this process are in the row: [N]."""
        index = torch.arange(num_tokens // PIECES, device=device)
        return torch.cat([piece * (num_tokens // PIECES) + index for piece in self.own])

    def running_sum(self, x: Tensor) -> Tensor:
        """Sums over all tokens of the row up to each one; x and the result are [..., N] of this process."""
        pieces = x.unflatten(-1, (PIECES, -1)).cumsum(-1)
        return (pieces + self._before(pieces[..., -1])[..., None]).flatten(-2)

    def extreme(self, x: Tensor, largest: bool) -> Tensor:
        """The smallest or largest of what all processes have."""
        x = x.clone()
        dist.all_reduce(x, dist.ReduceOp.MAX if largest else dist.ReduceOp.MIN, group=self.group)
        return x

    def check_order(self, ids: Tensor) -> None:
        """Raise ValueError for ids [B, N] that do not grow along the whole row: a packed row would leak."""
        pieces = ids.unflatten(-1, (PIECES, -1))
        grows = bool((pieces.diff(dim=-1) > 0).all())
        ends = self._in_order(torch.stack((pieces[..., 0], pieces[..., -1])).movedim(-1, 0).contiguous())
        across = bool((ends[1:, 0] > ends[:-1, 1]).all())
        fine = self.extreme(torch.tensor(int(grows and across), device=ids.device), largest=False)
        if not bool(fine):
            raise ValueError(
                "position_ids do not grow along the row, as in packed rows, and rows that are split over processes "
                "cannot be packed; train on rows of one document each."
            )

    def _in_order(self, pieces: Tensor) -> Tensor:
        """[2, ...] of this process -> [2c, ...] of all processes, in the order of the row."""
        gathered = [torch.empty_like(pieces) for _ in range(self.size)]
        dist.all_gather(gathered, pieces, group=self.group)
        return torch.stack([each[0] for each in gathered] + [each[1] for each in reversed(gathered)])

    def _before(self, totals: Tensor) -> Tensor:
        """Sums of all earlier pieces; both [..., 2] of this process's pieces."""
        return _SumBefore.apply(totals, self)


class _SumBefore(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, totals: Tensor, shards: Shards) -> Tensor:
        ctx.shards = shards
        ordered = shards._in_order(totals.movedim(-1, 0).contiguous())
        before = ordered.cumsum(0) - ordered
        return before[list(shards.own)].movedim(0, -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # a piece counts in all later ones
        ordered = ctx.shards._in_order(gradient.movedim(-1, 0).contiguous())
        after = ordered.flip(0).cumsum(0).flip(0) - ordered
        return after[list(ctx.shards.own)].movedim(0, -1), None
