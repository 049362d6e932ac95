"""The ranks of one mesh dim, as operators see them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

# torch 2.13 renames these two.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def own_chunks(x: torch.Tensor, dim: int, cp: Group) -> torch.Tensor:
    """A context-parallel rank's two chunks of a whole sequence: see `meg_compile.ops.context`."""
    chunks = x.chunk(2 * cp.size, dim)
    return torch.cat([chunks[cp.rank], chunks[2 * cp.size - 1 - cp.rank]], dim)


@dataclass(frozen=True)
class Group:
    """`size` ranks of which this is `rank`. Without a process group nothing is sent: one rank, or a trial run."""

    size: int = 1
    rank: int = 0
    pg: dist.ProcessGroup | None = None

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """The ranks' tensors as one: [size, *x.shape]."""
        out = x.new_empty(self.size, *x.shape)
        if self.pg is not None:
            _all_gather(out.flatten(0, 1), x.contiguous(), group=self.pg)
        return out

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's slice of the ranks' sum, of a tensor [size, ...].

        On the CPU the slices are exchanged and added here: gloo's own takes twice as long.
        """
        if self.pg is None:
            return x.new_empty(x.shape[1:])
        if x.is_cpu:
            slices = torch.empty_like(x, memory_format=torch.contiguous_format)
            dist.all_to_all_single(slices.flatten(0, 1), x.contiguous().flatten(0, 1), group=self.pg)
            return slices.sum(0)
        out = x.new_empty(x.shape[1:])
        _reduce_scatter(out, x.contiguous().flatten(0, 1), group=self.pg)
        return out

    def all_reduce_(self, x: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
        """Reduce a contiguous tensor in place over the group's ranks, and return it."""
        if self.pg is not None:
            dist.all_reduce(x, op, group=self.pg)
        return x
