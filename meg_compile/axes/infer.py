"""One walk over a captured graph, in which every operator's rule states what it knows about axes."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

import meg_compile.axes.rules  # noqa: F401  (registers the rules)
from meg_compile.axes.atoms import Dims, name, size_of
from meg_compile.axes.op import Op, Rule, dims_like, each, rule_for
from meg_compile.errors import Fault, MegError, Refused
from meg_compile.graph.nodes import BOUND, can_have_gradient, in_source, operand


@dataclass(frozen=True)
class Axes:
    """The axes of a graph: what is known of every node, and the Dims of every stored tensor by its name."""

    ops: dict[fx.Node, Op]
    stored: dict[str, Dims]


def infer(graph: fx.Graph, tensors: dict[str, torch.Tensor]) -> Axes:
    """Infer the logical axes of a graph whose get_attr nodes name entries of `tensors`.

    Refused where a rule fails, or its result contradicts the shape that was captured (a fault of the rule).
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
            apply_rule(op, ops)
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


def apply_rule(op: Op, ops: Mapping[fx.Node, Op]) -> None:
    """Fill in what is known of an operator from its operands and its rule."""
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
    if rule is None:
        op.out = op.unknown()
        return
    try:
        op.out = rule(op, *args, **kwargs)
    except Exception as error:
        raise Refused(_at_fault(op, rule, f"raises {type(error).__name__}: {error}")) from error
    values, outs = (v if isinstance(v, (list, tuple)) and not isinstance(v, Dims) else [v] for v in (op.val, op.out))
    says, is_ = list(map(_sizes, outs)), [list(v.shape) if isinstance(v, torch.Tensor) else None for v in values]
    if len(says) != len(is_) or any(shape is not None and said != shape for said, shape in zip(says, is_, strict=True)):
        raise Refused(_at_fault(op, rule, f"says {_shown(says)}, and the operator gives {_shown(is_)}"))


def _sizes(out: Any) -> list[int] | str:
    return [size_of(dim) for dim in out] if isinstance(out, Dims) else type(out).__name__


def _shown(shapes: list[Any]) -> str:
    return ", ".join(map(str, shapes))


def _at_fault(op: Op, rule: Rule, problem: str) -> Fault:
    code = getattr(rule, "__code__", None)
    where = f" ({Path(code.co_filename).name}:{code.co_firstlineno})" if code else ""
    about = f"the rule {getattr(rule, '__name__', 'given')}{where} {problem}"
    fix = "let it return the Dims of each result, with a dim for each of its dims, or op.unknown()"
    return Fault(f"{op.name}{in_source(op.node)}", None, about, fix)


def _has_gradient(val: Any) -> bool:
    values = val if isinstance(val, (list, tuple)) else [val]
    return any(map(can_have_gradient, values))
