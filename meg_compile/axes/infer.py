"""One walk over a captured graph, in which every operator's rule states what it knows about axes."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

import meg_compile.axes.rules  # noqa: F401  (registers the rules)
from meg_compile.axes.atoms import Dims, name, size_of
from meg_compile.axes.op import Op, dims_like, each, rule_for
from meg_compile.errors import MegError
from meg_compile.graph.nodes import BOUND, operand


@dataclass(frozen=True)
class Axes:
    """The axes of a graph: what is known of every node, and the Dims of every stored tensor by its name."""

    ops: dict[fx.Node, Op]
    stored: dict[str, Dims]


def infer(graph: fx.Graph, tensors: dict[str, torch.Tensor]) -> Axes:
    """Infer the logical axes of a graph whose get_attr nodes name entries of `tensors`.

    MegError where a rule's result contradicts the shape that was captured (a fault of the rule).
    """
    ops: dict[fx.Node, Op] = {}
    stored: dict[str, Dims] = {}
    for node in graph.nodes:
        op = ops[node] = Op(node)
        if node.op == "get_attr" and node.target in BOUND:
            op.constant = True
        elif node.op == "get_attr":
            op.val = tensors[node.target]
            op.constant, op.grad = True, op.val.requires_grad
            op.out = stored.setdefault(node.target, dims_like(op.val))
        elif node.op == "placeholder":
            op.out = dims_like(op.val)
        elif node.op == "call_function":
            _call(op, ops)
        elif node.op == "output":
            op.operands = [ops[n].out for n in node.all_input_nodes]
        else:
            raise MegError(f"{node.format_node()}: a captured graph has no such node")
    for node, op in ops.items():
        if node.op == "placeholder" and isinstance(op.out, Dims):
            for dim, word in zip(op.out, ("batch", "seq"), strict=False):
                name(dim, word)
        if op.lookup is not None:
            name(op.lookup, "positions" if ops[operand(node, 1)].constant else "vocab")
    return Axes(ops, stored)


def _call(op: Op, ops: dict[fx.Node, Op]) -> None:
    node = op.node
    inputs = [ops[n] for n in node.all_input_nodes]
    op.constant = all(i.constant for i in inputs)
    op.weights = [i.out for i in inputs if i.constant and isinstance(i.out, Dims)]
    args: Any = map_arg(node.args, lambda n: ops[n].out)
    kwargs: Any = map_arg(node.kwargs, lambda n: ops[n].out)
    op.operands = list(each(args, kwargs))
    op.grad = op.name != "detach" and any(i.grad for i in inputs) and _has_gradient(op.val)
    if node.target is operator.getitem:
        op.out = args[0][args[1]]
        return
    rule = rule_for(op)
    op.out = rule(op, *args, **kwargs) if rule else op.unknown()
    if isinstance(op.val, torch.Tensor) and [size_of(d) for d in op.out] != list(op.val.shape):
        raise MegError(f"{node.format_node()}: its rule says {op.out}, the capture {tuple(op.val.shape)}")


def _has_gradient(val: Any) -> bool:
    values = val if isinstance(val, (list, tuple)) else [val]
    return any(isinstance(v, torch.Tensor) and (v.is_floating_point() or v.is_complex()) for v in values)
