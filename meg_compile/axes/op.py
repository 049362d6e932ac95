"""What is known about one node of the graph, and the registry of rules that say it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import torch
from torch import fx

from meg_compile.axes.atoms import Dim, Dims, atoms, cut, fresh, mark_whole, size_of
from meg_compile.graph.nodes import base_name, is_entry_by_entry, source_line

Rule = Callable[..., Any]
"""(op, *args, **kwargs) with tensors as Dims -> the Dims of the result (a list for several results)."""

Localise = Callable[..., tuple[Any, tuple, dict]]
"""(size, *args, **kwargs) -> (target, args, kwargs): how the op is written on shards; size(dim) is a local size."""

NO_RULE = "has no rule"
_RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for operators: torch's by name ("add") or name and overload ("max.other"), those of a library
    with its namespace ("mylib::scale").

    A rule is called with what is known of the operator (`Op`) and with its arguments, tensors as their dims (`Dims`).
    It states facts about axes, which must hold in forward and backward (`broadcast`, `unify` and `Dims` are in
    `meg_compile.axes`):

        return x                     the result has the axes of x (for several results: a list)
        broadcast(x, y)              entry by entry: dims that broadcast together are one axis; gives the result's Dims
        unify(x[0], y[1])            these two dims are the same axis
        x.put(1, d)                  x with another dim 1; with none, x.put(1), without that dim
        op.whole(x[1], "sorts it")   every rank needs all of this dim, and why
        op.new_whole(n, "makes it")  a new dim of n entries that stays whole
        op.sum(x[1])                 sums over this dim, so that on a part of it the result is a partial sum
        op.average = True            and divides the sum by the number of entries
        op.space, op.work            the dims that it loops over, and operations at each point of these (for costs)
        op.localise = f              f(size, *args, **kwargs) -> (target, args, kwargs): how it is called on shards,
                                     where arguments are sizes; size(dim) is a local one
        return op.unknown()          for a use that the rule does not know: all that it touches stays whole

    A dim that the rule neither needs whole nor sums over may be cut: the operator must then give on a part of it that
    part of its result. The compiler checks the sizes that a rule gives against the captured ones; that it tells the
    truth is what task=verify shows. ValueError for a name that has a rule already.
    """

    def add(fn: Rule) -> Rule:
        for name in (name.removeprefix("aten::") for name in names):
            known = _RULES.get(name)
            if known is not None and (known.__module__, known.__qualname__) != (fn.__module__, fn.__qualname__):
                raise ValueError(f"operator {name} has a rule already: {known.__name__}")
            _RULES[name] = fn
        return fn

    return add


def how_to_add(name: str) -> str:
    """What a user does about an operator without a rule."""
    return f'add one beside the model, with @meg_compile.rule("{name}")'


def rule_for(op: Op) -> Rule | None:
    overload = getattr(op.node.target, "_overloadname", "")
    known = _RULES.get(f"{op.name}.{overload}") or _RULES.get(op.name)
    return known or (_RULES["add"] if is_entry_by_entry(op.node) else None)


class Op:
    """One node: its value, its axes, and what its operator asks of them.

    out:       Dims of the result, or a list of them, or None (not a tensor).
    constant:  derived from parameters, buffers and literals only.
    grad:      gradients flow through it.
    operands:  Dims of the tensors it reads that matter to its value.
    needed:    dims that it needs whole.
    summed:    dims that it sums over: on shards of one the result is a partial sum.
    average:   the sum is divided by the number of entries.
    space:     dims that it loops over, where no single tensor spans them.
    work:      floating-point operations for each point of that space; 0 where it only moves memory.
    lookup:    the dim that indices point into (an embedding's rows).
    classes:   the dim of a cross entropy's classes.
    split_bias: for a contraction with a bias: (target, positions of its operands, position of the bias).
    localise:  how it is written on shards, where literals or the operator itself change.
    attends:   (queries, keys, values, mask) of an attention.
    drawn:     dims of what it draws a dropout mask for.
    ruled:     a rule knows this use of it.
    source:    makes its value from nothing (arange): on shards each rank takes its part.
    """

    def __init__(self, node: fx.Node):
        self.node = node
        self.val: Any = node.meta.get("val")
        self.name = base_name(node.target)
        self.out: Any = None
        self.constant = False
        self.grad = False
        self.operands: list[Dims] = []
        self.weights: list[Dims] = []
        self.needed: list[Dim] = []
        self.summed: list[Dim] = []
        self.average = False
        self.space: Dims | None = None
        self.work = 0
        self.lookup: Dim | None = None
        self.classes: Dim | None = None
        self.split_bias: tuple[Any, tuple[int, ...], int] | None = None
        self.localise: Localise | None = None
        self.attends: tuple[Dims, Dims, Dims, Dims | None] | None = None
        self.drawn: Dims | None = None
        self.ruled = True
        self.source = False

    @property
    def flops(self) -> int:
        """Floating-point operations of its forward on whole tensors."""
        return self.work * prod(map(size_of, self.space or ()))

    def because(self, why: str) -> str:
        """Why a dim is whole, with the operator's name and place in the source: also `Atom.whole` of such a dim."""
        return f"{self.name} {why} ({source_line(self.node) or self.node.name})"

    def whole(self, dim: Dim, why: str) -> None:
        """This operator needs all of a dim: every rank keeps it whole."""
        self.needed.append(dim)
        mark_whole(dim, self.because(why))

    def new_whole(self, size: int, why: str) -> Dim:
        dim = fresh(size)
        self.whole(dim, why)
        return dim

    def sum(self, *dims: Dim) -> None:
        self.summed.extend(dims)

    def fresh(self) -> Any:
        """New dims of the result's sizes."""
        return dims_like(self.val)

    def cut(self, dim: Dim, sizes: list[int]) -> list[Dim]:
        """Consecutive pieces of a dim. Only what a weight makes is cut into shards; positions stay whole."""
        worth = (self.constant and self.grad) or any(a.produced for a in atoms(dim))
        pieces = cut(dim, sizes) if worth or len(sizes) == 1 else None
        if pieces is None:
            self.whole(dim, "cuts it into pieces")
            return [self.new_whole(s, "makes it by cutting") for s in sizes]
        return pieces

    def unknown(self) -> Any:
        """No rule: every axis it touches stays whole."""
        self.ruled = False
        out = self.fresh()
        for dims in [*self.operands, *each(out)]:
            for dim in dims:
                self.whole(dim, NO_RULE)
        return out

    def is_weight(self, dims: Dims) -> bool:
        """Whether an operand comes of parameters alone while the op also takes data."""
        return not self.constant and any(dims is w for w in self.weights)

    def shapes(self) -> Iterator[Dims]:
        """Every tensor of this op and the space it loops over: atoms that meet here cannot both be sharded."""
        yield from self.operands
        yield from each(self.out)
        if self.space is not None:
            yield self.space


def dims_like(val: Any) -> Any:
    if isinstance(val, (list, tuple)):
        return [dims_like(v) for v in val]
    return Dims(fresh(int(n)) for n in val.shape) if isinstance(val, torch.Tensor) else None


def each(*values: Any) -> Iterator[Dims]:
    """The Dims in nested lists, tuples and dicts of arguments."""
    for value in values:
        if isinstance(value, Dims):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from each(*value)
        elif isinstance(value, dict):
            yield from each(*value.values())
