"""The ranks of one mesh dim, as operators see them."""

from __future__ import annotations

from collections.abc import Sequence
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

    def all_gather(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """The ranks' tensors, in their order."""
        if self.pg is None:
            return [x] * self.size
        if x.is_cpu:
            received = self._exchange([x] * self.size)
            return [*received[: self.rank], x, *received[self.rank :]]
        out = x.new_empty(self.size, *x.shape)
        _all_gather(out.flatten(0, 1), x.contiguous(), group=self.pg)
        return out.unbind()

    def reduce_scatter(self, slices: Sequence[torch.Tensor]) -> torch.Tensor:
        """This rank's slice of the ranks' sum, given a slice for each rank."""
        own = slices[self.rank]
        if self.pg is not None and own.is_cpu:
            total, *others = self._exchange(slices)
            for other in (own, *others):
                total.add_(other)
            return total
        out = torch.empty_like(own, memory_format=torch.contiguous_format)
        if self.pg is not None:
            _reduce_scatter(out, torch.stack(list(slices)).flatten(0, 1), group=self.pg)
        return out

    def _exchange(self, slices: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Send each other rank its slice; what the others have for this one, in their order.

        gloo's own all-gather and reduce-scatter take about twice as long.
        """
        sent = [x.reshape(-1) for rank, x in enumerate(slices) if rank != self.rank]
        sizes = [0 if rank == self.rank else x.numel() for rank, x in enumerate(slices)]
        received = slices[0].new_empty(len(sent), *slices[0].shape)
        whole = sent[0] if len(sent) == 1 else torch.cat(sent)
        dist.all_to_all_single(received.view(-1), whole, sizes, sizes, group=self.pg)
        return received.unbind()

    def all_reduce_(self, x: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
        """Reduce a contiguous tensor in place over the group's ranks, and return it."""
        if self.pg is not None:
            dist.all_reduce(x, op, group=self.pg)
        return x
