"""The conjugate operators of tensor parallelism (Shoeybi et al. 2019, figure 3), and a rank's part of a whole.

operator         forward       backward
copy_to_tp       identity      all-reduce     f: a whole value enters a region that works on shards
reduce_from_tp   all-reduce    identity       g: partial sums leave it as a whole value
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch

from meg_compile.ops.group import Group


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tp: Group, owned: bool) -> torch.Tensor:
        ctx.tp, ctx.owned = tp, owned
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.tp.all_reduce_(grad if ctx.owned and grad.is_contiguous() else _copy(grad)), None, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tp: Group, owned: bool) -> torch.Tensor:
        if not (owned and x.is_contiguous()):
            return tp.all_reduce_(_copy(x))
        ctx.mark_dirty(x)
        return tp.all_reduce_(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad, None, None


def copy_to_tp(x: torch.Tensor, tp: Group, owned: bool = False) -> torch.Tensor:
    """f: forward x itself, backward the sum of the ranks' gradients, in place if that of x's readers is `owned`."""
    return _Copy.apply(x, tp, owned)


def reduce_from_tp(x: torch.Tensor, tp: Group, owned: bool = False) -> torch.Tensor:
    """g: forward the sum of the ranks' partial sums, in place if x is `owned`, backward the gradient itself."""
    return _Reduce.apply(x, tp, owned)


def _copy(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _cut(x: torch.Tensor, tp: Group, dim: int, before: int) -> list[torch.Tensor]:
    """The ranks' parts of the sequence inside a dim [before, tp, part, ...], as views where they can be."""
    parts = x.unflatten(dim, (before, tp.size, -1)).unbind(dim + 1)
    return [part.flatten(dim, dim + 1) if before > 1 else part.squeeze(dim) for part in parts]


def _join(parts: Sequence[torch.Tensor], dim: int, before: int) -> torch.Tensor:
    """The inverse of _cut."""
    if before == 1:
        return torch.cat(list(parts), dim)
    return torch.stack([part.unflatten(dim, (before, -1)) for part in parts], dim + 1).flatten(dim, dim + 2)


def _gather(x: torch.Tensor, tp: Group, dim: int, before: int) -> torch.Tensor:
    return _join(tp.all_gather(x), dim, before)


def _reduce_scatter(x: torch.Tensor, tp: Group, dim: int, before: int) -> torch.Tensor:
    return tp.reduce_scatter(_cut(x, tp, dim, before))


def _own(x: torch.Tensor, tp: Group, dim: int, before: int) -> torch.Tensor:
    return _copy(_cut(x, tp, dim, before)[tp.rank])


class _Move(torch.autograd.Function):
    """A move of the sequence and, for the gradient, the move back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, there: Any, back: Any, *how: Any) -> torch.Tensor:
        ctx.back, ctx.how = back, how
        return there(x, *how)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.back(grad, *ctx.how), *(None for _ in range(2 + len(ctx.how)))


def gather_to_tp(x: torch.Tensor, tp: Group, dim: int, before: int = 1) -> torch.Tensor:
    """f on parts of the sequence: the whole sequence enters a region that works on shards."""
    whole = _Move.apply(x, _gather, _reduce_scatter, tp, dim, before)
    if not torch.compiler.is_compiling() and (listener := _LISTENER.get()) is not None:
        listener(Gathering(x.detach(), tp, dim, before), whole)
    return whole


class Gathering(NamedTuple):
    """The arguments of a `gather_to_tp`."""

    part: torch.Tensor
    tp: Group
    dim: int
    before: int

    def again(self) -> torch.Tensor:
        """The whole value once more, without a gradient."""
        return _gather(*self)


Listener = Callable[[Gathering, torch.Tensor], None]
_LISTENER: ContextVar[Listener | None] = ContextVar("gather_to_tp", default=None)


def when_gathered(listener: Listener | None) -> Listener | None:
    """Have a function called on every `gather_to_tp` of this thread, with its result. Returns the one before."""
    before = _LISTENER.get()
    _LISTENER.set(listener)
    return before


def scatter_from_tp(x: torch.Tensor, tp: Group, dim: int, before: int = 1) -> torch.Tensor:
    """g on parts of the sequence: each rank gets the sum of its part."""
    return _Move.apply(x, _reduce_scatter, _gather, tp, dim, before)


def gather_sequence(x: torch.Tensor, tp: Group, dim: int, before: int = 1) -> torch.Tensor:
    """The whole sequence for an operator that every rank runs alike on whole values."""
    return _Move.apply(x, _gather, _own, tp, dim, before)


def cut_sequence(x: torch.Tensor, tp: Group, dim: int, before: int = 1) -> torch.Tensor:
    """This rank's part of a whole sequence."""
    return _Move.apply(x, _own, _gather, tp, dim, before)


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
