"""The ranks of one mesh dim, as operators see them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Group:
    """`size` ranks of which this is `rank`. Without a process group nothing is sent: one rank, or a trial run."""

    size: int = 1
    rank: int = 0
    pg: dist.ProcessGroup | None = None

    def all_reduce_(self, x: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
        """Reduce a contiguous tensor in place over the group's ranks, and return it."""
        if self.pg is not None:
            dist.all_reduce(x, op, group=self.pg)
        return x
