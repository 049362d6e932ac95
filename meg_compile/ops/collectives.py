"""The conjugate operators of tensor parallelism (Shoeybi et al. 2019, figure 3), and a rank's part of a whole.

operator         forward       backward
copy_to_tp       identity      all-reduce     f: a whole value enters a region that works on shards
reduce_from_tp   all-reduce    identity       g: partial sums leave it as a whole value
"""

from __future__ import annotations

from typing import Any

import torch

from meg_compile.ops.group import Group


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tp: Group) -> torch.Tensor:
        ctx.tp = tp
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.tp.all_reduce_(grad.clone(memory_format=torch.contiguous_format)), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tp: Group) -> torch.Tensor:
        return tp.all_reduce_(x.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def copy_to_tp(x: torch.Tensor, tp: Group) -> torch.Tensor:
    """f: forward x itself, backward the sum of the ranks' gradients."""
    return _Copy.apply(x, tp)


def reduce_from_tp(x: torch.Tensor, tp: Group) -> torch.Tensor:
    """g: forward the sum of the ranks' partial sums, backward the gradient itself."""
    return _Reduce.apply(x, tp)


def part_of(x: torch.Tensor, tp: Group, dims: list[list[tuple[int, bool]]]) -> torch.Tensor:
    """This rank's part of a value that every rank has whole and that needs no gradient.

    dims: for each dim of x the (size, sharded) of its axes, major to minor.
    """
    flat = [axis for dim in dims for axis in dim]
    x = x.reshape([size for size, _ in flat])
    for i, (size, sharded) in enumerate(flat):
        if sharded:
            x = x.narrow(i, tp.rank * (size // tp.size), size // tp.size)
    local = [[size // tp.size if sharded else size for size, sharded in dim] for dim in dims]
    return x.reshape([torch.Size(sizes).numel() for sizes in local])
