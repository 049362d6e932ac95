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
from meg_compile.axes.op import Op, each
from meg_compile.errors import MegError
from meg_compile.graph.nodes import CP, RNG, TP, operand
from meg_compile.ops.collectives import (
    copy_to_tp,
    cut_sequence,
    gather_sequence,
    gather_to_tp,
    part_of,
    reduce_from_tp,
    scatter_from_tp,
)
from meg_compile.ops.decoding import gather_logits
from meg_compile.ops.dropout import sharded_attention, sharded_dropout
from meg_compile.ops.vocabulary import vocab_cross_entropy, vocab_embedding
from meg_compile.passes.dropout import places
from meg_compile.passes.sequence import Sequence

aten = torch.ops.aten


@dataclass
class TensorParallel:
    """The rewritten graph; `partial` names the parameters whose gradients are still to be summed over tp."""

    graph: fx.Graph
    partial: set[str]


def tensor_parallel(graph: fx.Graph, axes: Axes, layout: Layout, sequence: Sequence) -> TensorParallel:
    return _Rewriter(graph, axes, layout, sequence).run()


class _Rewriter:
    """`works` says in which layout an operator works, `leaves` in which its result is left."""

    def __init__(self, graph: fx.Graph, axes: Axes, layout: Layout, sequence: Sequence):
        self.old, self.axes, self.layout, self.sequence = graph, axes, layout, sequence
        self.new = fx.Graph()
        self.env: dict[fx.Node, fx.Node] = {}
        self.moved: dict[tuple[fx.Node, Any], fx.Node] = {}
        self.bound: dict[str, fx.Node] = {}
        self.works = {n: sequence.layout if n in sequence.nodes else layout for n in graph.nodes}
        self.leaves: dict[fx.Node, Layout] = {}
        for node in graph.nodes:
            if node.target is operator.getitem:
                self.works[node] = self.works[operand(node, 0)]
            self.leaves[node] = self.left_in(node, axes.ops[node])
        self.on_shards = {
            n for n, op in axes.ops.items() if n.op == "call_function" and self.works[n].touches(op.shapes())
        }

    def left_in(self, node: fx.Node, op: Op) -> Layout:
        if self.sums(op) and isinstance(op.out, Dims) and self.sequence.at(op.out) and not holds(self.layout, op.out):
            return self.sequence.layout
        return self.works[node]

    def run(self) -> TensorParallel:
        for node in self.old.nodes:
            op = self.axes.ops[node]
            if node.op == "call_function":
                new = self.rewrite(node, op)
            else:
                new = self.new.node_copy(node, lambda n, reader=node: self.read(n, reader, self.layout))
            self.env[node] = self.describe(new, node, op.out, self.leaves[node])
        partial = {str(n.target) for n in self.old.nodes if n.op == "get_attr" and self.gets_partial_gradients(n)}
        return TensorParallel(self.new, partial)

    def gets_partial_gradients(self, node: fx.Node) -> bool:
        """Whether a whole parameter is read on shards only, so that its gradient can be summed once a step."""
        op = self.axes.ops[node]
        if node.op != "get_attr" or not op.grad or not node.users or holds(self.sequence.layout, op.out):
            return False
        return all(self.reads_on_shards(user, node) for user in node.users)

    def reads_on_shards(self, user: fx.Node, node: fx.Node) -> bool:
        if node is self.late_bias(user):
            return holds(self.leaves[user], self.axes.ops[user].out)
        return user in self.on_shards

    def late_bias(self, node: fx.Node) -> fx.Node | None:
        """The bias that is added to a node's result after g."""
        op = self.axes.ops[node]
        if op.split_bias is None or not self.sums(op) or op.split_bias[2] >= len(node.args):
            return None
        return operand(node, op.split_bias[2])

    def sums(self, op: Op) -> bool:
        return any(self.layout.holds(dim) for dim in op.summed)

    def rewrite(self, node: fx.Node, op: Op) -> fx.Node:
        """One operator, and what must follow it."""
        target, args, kwargs, bias = node.target, node.args, node.kwargs, self.late_bias(node)
        layout, on_shards = self.works[node], node in self.on_shards
        if bias is not None and op.split_bias is not None:
            target, kept, _ = op.split_bias
            args = tuple(args[i] for i in kept)
        args, kwargs = map_arg((args, kwargs), lambda n: self.read(n, node, layout, on_shards))
        if op.drawn is not None:
            args = self.draw(op, layout, args)
        special = self.special(node, op) if on_shards else None
        if special is not None:
            target, args, kwargs = special(*args, **kwargs)
        elif op.localise is not None and on_shards:
            target, args, kwargs = op.localise(layout.local, *args, **kwargs)
        new = self.call(node, node.name, target, *args, **kwargs)
        new.meta["flops"] = op.work * prod(map(layout.local, op.space or ()))
        new.meta["whole_flops"] = op.flops
        if op.source and on_shards:
            new = self.call(node, f"{node.name}_part", part_of, new, self.bind(TP), spell(op.out, layout))
        if self.sums(op):
            new = self.sum(node, op, new)
        elif on_shards and not self.accounted(op, layout):
            raise MegError(f"{node.format_node()}: works on shards, and its result is neither sharded nor summed")
        if bias is not None:
            self.describe(new, node, op.out, self.leaves[node])
            held = holds(self.leaves[node], op.out)
            added = self.read(bias, node, self.leaves[node], held)
            new = self.call(node, f"{node.name}_biased", aten.add.Tensor, new, added)
        return new

    def draw(self, op: Op, layout: Layout, args: tuple) -> tuple:
        """Where on the ranks the axes lie for which a dropout draws; under cp the graph says where their parts do."""
        found, of_rows = places(op, self.axes, layout)
        if isinstance(args[-1], (list, tuple)):
            found = [list(map(_joined, *pair)) for pair in zip(args[-1], found, strict=True)]
            args = args[:-1]
        return *args, found, of_rows, self.bind(TP), self.bind(CP)

    def sum(self, node: fx.Node, op: Op, new: fx.Node) -> fx.Node:
        """g: the sum of the ranks' partial sums, whole or each rank's part of the sequence."""
        at = self.sequence.at(op.out) if self.leaves[node] is not self.layout else None
        if at is None:
            new = self.call(node, f"g_{node.name}", reduce_from_tp, new, self.bind(TP))
        else:
            new = self.call(node, f"g_{node.name}", scatter_from_tp, new, self.bind(TP), *at)
        if op.average:
            new = self.call(node, f"{node.name}_mean", operator.truediv, new, self.layout.tp)
        return new

    def read(self, node: fx.Node, reader: fx.Node, layout: Layout, on_shards: bool = False) -> fx.Node:
        """A value as an operator that works in a layout reads it: moved there, and through f where its gradient must
        come out whole."""
        op = self.axes.ops[node]
        if not isinstance(op.out, Dims):
            return self.env[node]
        at = self.sequence.at(op.out)
        if at is not None and self.leaves[node] is not layout:
            if layout is not self.layout and not op.grad:
                return self.move(node, reader, layout, "part", part_of, spell(op.out, layout))
            if layout is not self.layout:
                return self.move(node, reader, layout, "part", cut_sequence, *at)
            if on_shards:
                return self.move(node, reader, layout, "f", gather_to_tp, *at)
            return self.move(node, reader, layout, "all", gather_sequence, *at)
        whole = not holds(self.leaves[node], op.out)
        if whole and on_shards and op.grad and not self.gets_partial_gradients(node):
            return self.move(node, reader, layout, "f", copy_to_tp)
        return self.env[node]

    def move(self, node: fx.Node, reader: fx.Node, layout: Layout, prefix: str, target: Any, *how: Any) -> fx.Node:
        """A value in another layout: once per value and kind of move, whatever the number of readers."""
        if (node, target) not in self.moved:
            op = self.axes.ops[node]
            new = self.call(reader, f"{prefix}_{node.name}", target, self.env[node], self.bind(TP), *how)
            new.meta |= {"dims": op.out, "layout": layout, "constant": op.constant, "grad": op.grad}
            self.moved[node, target] = new
        return self.moved[node, target]

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
            if op.name == "all_logits":
                return lambda x: (gather_logits, (x, self.bind(TP), num_classes), {})
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

    def accounted(self, op: Op, layout: Layout) -> bool:
        if op.classes is not None and layout.holds(op.classes):
            return True
        return all(holds(layout, out) for out in each(op.out))

    def call(self, like: fx.Node, name: str, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        new = self.new.create_node("call_function", target, args, kwargs, name)
        return self.describe(new, like, None, self.layout)

    def bind(self, name: str) -> fx.Node:
        """A value that is bound when a rank materialises the graph: its tp group, its random stream."""
        if name not in self.bound:
            first = next(iter(self.new.nodes), None)
            with self.new.inserting_before(first):
                self.bound[name] = self.new.get_attr(name)
        return self.bound[name]

    def describe(self, new: fx.Node, old: fx.Node, dims: Any, layout: Layout) -> fx.Node:
        """Keep where in the user's model a node comes from; `dims` in `layout` are those that its value must have."""
        op = self.axes.ops[old]
        new.meta |= {key: old.meta[key] for key in ("nn_module_stack", "stack_trace") if key in old.meta}
        new.meta |= {"dims": dims, "layout": layout, "grad": op.grad, "constant": op.constant}
        return new


def _joined(under_cp: tuple[int, str], under_tp: tuple[int, str]) -> tuple[int, str]:
    parts = dict.fromkeys((under_cp[1], under_tp[1]))
    return under_cp[0], " ".join(filter(None, parts))


def spell(dims: Dims, layout: Layout) -> list[list[tuple[int, bool]]]:
    """For `part_of`: each dim's axes, major to minor, and whether they are sharded."""
    return [[(a.size, a in layout.sharded) for a in leaves(dim)] for dim in dims]


def holds(layout: Layout, dims: Any) -> bool:
    return isinstance(dims, Dims) and any(layout.holds(dim) for dim in dims)
