"""What is known about one node of the graph, and the registry of rules that say it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import torch
from torch import fx

from meg_compile.axes.atoms import Dim, Dims, atoms, cut, fresh, mark_whole, size_of
from meg_compile.graph.nodes import base_name, source_line

Rule = Callable[..., Any]
"""(op, *args, **kwargs) with tensors as Dims -> the Dims of the result (a list for several results)."""

Localise = Callable[..., tuple[Any, tuple, dict]]
"""(size, *args, **kwargs) -> (target, args, kwargs): how the op is written on shards; size(dim) is a local size."""

_RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for ATen operators, by name ("add") or name and overload ("max.other").

    A rule states facts about axes: it returns the result's Dims, having unified what is the same axis
    (`unify`), marked what is needed whole (`op.whole`), and said what is summed over (`op.sum`).
    ValueError for a name that has a rule already.
    """

    def add(fn: Rule) -> Rule:
        for name in names:
            if name in _RULES:
                raise ValueError(f"operator {name} has a rule already: {_RULES[name].__name__}")
            _RULES[name] = fn
        return fn

    return add


def rule_for(op: Op) -> Rule | None:
    overload = getattr(op.node.target, "_overloadname", "")
    return _RULES.get(f"{op.name}.{overload}") or _RULES.get(op.name)


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
        self.source = False

    @property
    def flops(self) -> int:
        """Floating-point operations of its forward on whole tensors."""
        return self.work * prod(map(size_of, self.space or ()))

    def whole(self, dim: Dim, why: str) -> None:
        """This operator needs all of a dim: every rank keeps it whole."""
        self.needed.append(dim)
        mark_whole(dim, f"{self.name} {why} ({source_line(self.node) or self.node.name})")

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
        out = self.fresh()
        for dims in [*self.operands, *each(out)]:
            for dim in dims:
                self.whole(dim, "has no rule")
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
