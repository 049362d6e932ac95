"""One operator of a graph as the rules of `rows` see it, and the registry of these rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from meg_compile.graph.nodes import base_name
from meg_compile.passes.rows.state import Const, Couples, Piece, Rows, State, Unclear, is_alike

ValueOf = Callable[[fx.Node], torch.Tensor | None]

Rule = Callable[..., Any]
"""(call) -> the state of the result (a list for several results). Raises `Couples` or `Unclear`."""

_RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for operators of these names that read rows."""

    def add(fn: Rule) -> Rule:
        _RULES.update(dict.fromkeys(names, fn))
        return fn

    return add


def rule_for(name: str) -> Rule | None:
    return _RULES.get(name)


class Call:
    """node: the operator. states: of all values so far. value_of: a node's value, where it is a constant."""

    def __init__(self, node: fx.Node, states: dict[fx.Node, Any], value_of: ValueOf = lambda node: None):
        self.node, self.states, self.value_of = node, states, value_of
        self.name = base_name(node.target)
        self.val: Any = node.meta.get("val")
        schema = getattr(node.target, "_schema", None)
        self.arguments: dict[str, Any] = {}
        if schema is not None:
            self.arguments = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
            self.arguments |= {a.name: value for a, value in zip(schema.arguments, node.args, strict=False)}
        self.arguments |= node.kwargs

    def __getitem__(self, name: str) -> Any:
        """An argument by its name; None where the operator has none of that name."""
        return self.arguments.get(name)

    @property
    def shape(self) -> list[int]:
        return self.shape_of(self.node)

    def shape_of(self, node: fx.Node) -> list[int]:
        return [int(n) for n in node.meta["val"].shape]

    def state(self, node: fx.Node) -> State:
        found = self.states[node]
        if isinstance(found, list):
            raise Unclear("it takes several values at once")
        return found

    def is_alike(self, node: fx.Node, dim: int) -> bool:
        """Whether all entries of a constant along a dim are the same: by rule, or by its value."""
        state, shape = self.state(node), self.shape_of(node)
        if not isinstance(state, Const) or is_alike(state, dim, shape):
            return isinstance(state, Const)
        value = self.value_of(node)
        return value is not None and bool((value == value.narrow(dim, 0, 1)).all())

    def rows(self, name: str = "self") -> tuple[Rows, list[int]]:
        """The one operand that may hold rows, and its shape; `Unclear` where another does."""
        node = self[name]
        holders = [n for n in self.node.all_input_nodes if isinstance(self.state(n), Rows)]
        if holders != [node]:
            raise Unclear("what its operands have to do with rows is not known")
        state = self.state(node)
        assert isinstance(state, Rows)
        return state, self.shape_of(node)


def joined(call: Call, operands: list[tuple[fx.Node, list[Any]]], out: list[Any], what: str) -> Rows | None:
    """Operands whose dims have labels, equal where they meet: the rows of the result, or None where none holds any.

    Rows must lie under the same labels in all operands that hold them, and those be labels of the result, or all be
    summed over (then: pieces of labels that are not in `out`). what: says how rows meet where they do not.
    """
    places: set[tuple[tuple[Any, int, int, int], ...]] = set()
    for node, labels in operands:
        state = call.state(node)
        if isinstance(state, Rows):
            places.add(tuple(sorted(((labels[p.dim], *p[1:]) for p in state.pieces), key=repr)))
    if not places:
        return None
    if len(places) > 1:
        raise Couples(what)
    (place,) = places
    for node, labels in operands:
        state = call.state(node)
        for label, *_ in place:
            if labels.count(label) > 1:
                raise Couples(what)
            if isinstance(state, Const) and label in labels and not call.is_alike(node, labels.index(label)):
                raise Couples("it treats a row by its place in the batch")
    gone = [label for label, *_ in place if label not in out]
    if gone and len(gone) < len(place):
        raise Couples(what)
    where = {label: (out.index(label) if not gone else -1) for label, *_ in place}
    return Rows(tuple(sorted(Piece(where[label], *rest) for label, *rest in place)))


def right_aligned(ndim: int) -> list[int]:
    """Labels of a tensor's dims by which tensors that broadcast together meet: -1 is the last."""
    return list(range(-ndim, 0))


def pointwise(call: Call, nodes: list[fx.Node], ndim: int) -> Rows:
    """The rows of a value to which every entry of some operands adds at its own place."""
    operands = [(node, right_aligned(len(call.shape_of(node)))) for node in nodes]
    found = joined(call, operands, right_aligned(ndim), "it brings different rows together")
    assert found is not None
    return found


def tensors(value: Any) -> list[fx.Node]:
    """The nodes in an argument that are tensors."""
    nodes = value if isinstance(value, (list, tuple)) else [value]
    return [n for n in nodes if isinstance(n, fx.Node) and isinstance(n.meta.get("val"), torch.Tensor)]
