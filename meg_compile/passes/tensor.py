"""Rewrite a graph so that each tp rank works on its shards, with explicit f and g.

In:  a captured graph over whole tensors, its axes, the chosen layout.
Out: a new graph over local tensors, the same on every rank. A value is sharded where its dims hold a chosen axis and
     whole otherwise.
       f   copy_to_tp:     a whole value that needs a gradient enters an operator that works on shards. One per value,
                           whatever the number of readers.
       g   reduce_from_tp: an operator sums over a chosen axis. A bias is added once, after it.
     A whole parameter that only operators on shards read gets partial gradients, which are summed once a step.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from meg_compile.axes.atoms import Dims, leaves, size_of
from meg_compile.axes.infer import Axes
from meg_compile.axes.layout import Layout
from meg_compile.axes.op import Op
from meg_compile.errors import MegError
from meg_compile.graph.nodes import operand
from meg_compile.ops.collectives import copy_to_tp, part_of, reduce_from_tp
from meg_compile.ops.dropout import sharded_attention, sharded_dropout
from meg_compile.ops.vocabulary import vocab_cross_entropy, vocab_embedding

aten = torch.ops.aten

TP, RNG = "tp_group", "shard_rng"
BOUND = (TP, RNG)
"""get_attr nodes that are no tensors: bound to the rank's tp Group and ShardRng when it materialises the graph."""


@dataclass
class TensorParallel:
    """The rewritten graph; `partial` names the parameters whose gradients are still to be summed over tp."""

    graph: fx.Graph
    partial: set[str]


def tensor_parallel(graph: fx.Graph, axes: Axes, layout: Layout) -> TensorParallel:
    return _Rewriter(graph, axes, layout).run()


class _Rewriter:
    def __init__(self, graph: fx.Graph, axes: Axes, layout: Layout):
        self.old, self.axes, self.layout = graph, axes, layout
        self.new = fx.Graph()
        self.env: dict[fx.Node, fx.Node] = {}
        self.copied: dict[fx.Node, fx.Node] = {}
        self.bound: dict[str, fx.Node] = {}
        self.on_shards = {n for n, op in axes.ops.items() if n.op == "call_function" and layout.touches(op.shapes())}

    def run(self) -> TensorParallel:
        for node in self.old.nodes:
            op = self.axes.ops[node]
            if node in self.on_shards:
                new = self.rewrite(node, op)
            else:
                new = self.new.node_copy(node, self.env.__getitem__)
                new.meta["flops"] = self.flops(op)
            self.env[node] = self.describe(new, node, op.out)
        partial = {str(n.target) for n in self.old.nodes if n.op == "get_attr" and self.gets_partial_gradients(n)}
        return TensorParallel(self.new, partial)

    def gets_partial_gradients(self, node: fx.Node) -> bool:
        """Whether a whole parameter is read on shards only, so that its gradient can be summed once a step."""
        op = self.axes.ops[node]
        if node.op != "get_attr" or not op.grad or not node.users or holds(self.layout, op.out):
            return False
        return all(user in self.on_shards and node is not self.late_bias(user) for user in node.users)

    def late_bias(self, node: fx.Node) -> fx.Node | None:
        """The bias that is added to a node's result after g."""
        op = self.axes.ops[node]
        if op.split_bias is None or not self.sums(op) or op.split_bias[2] >= len(node.args):
            return None
        return operand(node, op.split_bias[2])

    def flops(self, op: Op) -> int:
        """Floating-point operations of an operator's forward on one rank."""
        return op.work * prod(map(self.layout.local, op.space or ()))

    def sums(self, op: Op) -> bool:
        return any(self.layout.holds(dim) for dim in op.summed)

    def rewrite(self, node: fx.Node, op: Op) -> fx.Node:
        """One operator on shards, and what must follow it."""
        target, args, kwargs, bias = node.target, node.args, node.kwargs, self.late_bias(node)
        if bias is not None and op.split_bias is not None:
            target, kept, _ = op.split_bias
            args = tuple(args[i] for i in kept)
        args, kwargs = map_arg((args, kwargs), lambda n: self.operand(n, node))
        special = self.special(node, op)
        if special is not None:
            target, args, kwargs = special(*args, **kwargs)
        elif op.localise is not None:
            target, args, kwargs = op.localise(self.layout.local, *args, **kwargs)
        new = self.call(node, node.name, target, *args, **kwargs)
        new.meta["flops"] = self.flops(op)
        if op.source:
            new = self.call(node, f"{node.name}_part", part_of, new, self.bind(TP), self.spell(op.out))
        if self.sums(op):
            new = self.call(node, f"g_{node.name}", reduce_from_tp, new, self.bind(TP))
            if op.average:
                new = self.call(node, f"{node.name}_mean", operator.truediv, new, self.layout.tp)
        elif not self.accounted(op):
            raise MegError(f"{node.format_node()}: works on shards, and its result is neither sharded nor summed")
        if bias is not None:
            self.describe(new, node, op.out)
            new = self.call(node, f"{node.name}_biased", aten.add.Tensor, new, self.env[bias])
        return new

    def operand(self, node: fx.Node, reader: fx.Node) -> fx.Node:
        """A value as an operator on shards reads it: through f where its gradient must come out whole."""
        op = self.axes.ops[node]
        whole = isinstance(op.out, Dims) and not holds(self.layout, op.out)
        if not whole or not op.grad or self.gets_partial_gradients(node):
            return self.env[node]
        if node not in self.copied:
            f = self.call(reader, f"f_{node.name}", copy_to_tp, self.env[node], self.bind(TP))
            f.meta |= {"dims": op.out, "constant": op.constant}
            self.copied[node] = f
        return self.copied[node]

    def special(self, node: fx.Node, op: Op) -> Callable[..., Any] | None:
        """Operators that are another one on shards: (args) -> (target, args, kwargs)."""
        if op.lookup is not None and self.layout.holds(op.lookup):
            return lambda table, index, padding_idx=-1, *_: (
                vocab_embedding,
                (table, index, self.bind(TP), padding_idx),
                {},
            )
        if op.classes is not None and self.layout.holds(op.classes):
            num_classes = size_of(op.classes)
            return lambda x, target, weight=None, reduction=1, ignore_index=-100, *_: (
                vocab_cross_entropy,
                (x, target, self.bind(TP), num_classes, reduction, ignore_index),
                {},
            )
        if op.name == "dropout":
            return lambda x, p, train: (sharded_dropout, (x, p, train, self.bind(RNG)), {})
        if op.name == "scaled_dot_product_attention" and len(node.args) > 4 and node.args[4]:
            return lambda *args, **kwargs: (sharded_attention, (self.bind(RNG), *args), kwargs)
        return None

    def accounted(self, op: Op) -> bool:
        if op.classes is not None and self.layout.holds(op.classes):
            return True
        outs = op.out if isinstance(op.out, list) else [op.out]
        return all(holds(self.layout, out) for out in outs if out is not None)

    def call(self, like: fx.Node, name: str, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        new = self.new.create_node("call_function", target, args, kwargs, name)
        return self.describe(new, like, None)

    def bind(self, name: str) -> fx.Node:
        """A value that is bound when a rank materialises the graph: its tp group, its random stream."""
        if name not in self.bound:
            first = next(iter(self.new.nodes), None)
            with self.new.inserting_before(first):
                self.bound[name] = self.new.get_attr(name)
        return self.bound[name]

    def spell(self, dims: Dims) -> list[list[tuple[int, bool]]]:
        return [[(a.size, a in self.layout.sharded) for a in leaves(dim)] for dim in dims]

    def describe(self, new: fx.Node, old: fx.Node, dims: Any) -> fx.Node:
        """Keep where in the user's model a node comes from; `dims` are those that its value must have."""
        for key in ("nn_module_stack", "stack_trace"):
            if key in old.meta:
                new.meta[key] = old.meta[key]
        new.meta["dims"] = dims
        new.meta["grad"] = self.axes.ops[old].grad
        new.meta["constant"] = self.axes.ops[old].constant
        return new


def holds(layout: Layout, dims: Any) -> bool:
    return isinstance(dims, Dims) and any(layout.holds(dim) for dim in dims)
