"""Decoding: a model over whole sequences becomes one over its newest tokens.

In:  a captured graph from token ids [rows, total] to logits [rows, total, V], and its axes.
Out: a graph from the ids of n tokens at some position, [rows, n], to their logits [rows, n, V], in whatever place the
     position then has. It is the rewrite of context parallelism, with time in the place of ranks: all that needs no
     position but its own runs on the newest tokens, and attention finds the others' keys and values in a cache.
"""

from __future__ import annotations

from itertools import count

import torch
from torch import fx

from meg_compile.axes.infer import Axes, infer
from meg_compile.axes.layout import Layout
from meg_compile.axes.op import Op
from meg_compile.errors import Fault, Refused
from meg_compile.graph.capture import Captured
from meg_compile.graph.nodes import DECODING, attention_mask, in_source, operand
from meg_compile.ops.decoding import all_logits, cached_attention, newest_part
from meg_compile.passes.check import check_shapes
from meg_compile.passes.parts import Call, Parts, arguments_of_attention, on_parts, stands_in_the_way
from meg_compile.passes.sequence import find_sequences, why_not_found
from meg_compile.passes.values import ValueOf, find_value
from meg_compile.plan import Plan

FIX = "use a causal model whose attention is torch's scaled_dot_product_attention"


def decode(captured: Captured, axes: Axes, new: int, value_of: ValueOf) -> Axes:
    """Rewrites the captured graph for `new` tokens at a time, which divide the captured length; its axes.

    Refused, with the first operator that stands in the way, for a model whose logits need more than a cache of keys
    and values.
    """
    sequences = find_sequences(axes)
    (ids,) = (n for n in captured.graph.nodes if n.op == "placeholder")
    total = ids.meta["val"].shape[1]
    if {a.size for a in sequences} != {total}:
        found = ", ".join(str(size) for size in sorted({a.size for a in sequences}))
        problem = f"{total} tokens go in, and sequences of {found} were found" if found else why_not_found(axes)
        raise Refused(Fault("task", "generate", problem, FIX))
    layout = Layout(total // new, sequences)
    if (fault := _in_the_way(captured, axes, layout, value_of)) is not None:
        raise Refused(fault)
    graph = captured.graph = on_parts(captured.graph, axes, layout, _cached(new))
    output = next(n for n in reversed(graph.nodes) if n.op == "output")
    logits = operand(output, 0)
    with graph.inserting_before(output):
        output.args = (graph.call_function(all_logits, (logits,), name="all_logits"),)
        output.all_input_nodes[0].meta = dict(logits.meta)
    check_shapes(graph, Plan(), {name: tensor.to("meta") for name, tensor in captured.tensors.items()})
    return infer(graph, captured.tensors)


def _cached(new: int) -> Parts:
    sites = count()

    def attention(op: Op, at: fx.Node, args: tuple, kwargs: dict) -> Call:
        given, _ = arguments_of_attention(op, args, kwargs)
        return cached_attention, (*given, at, next(sites)), {}

    def part(x: fx.Node, at: fx.Node, dims: list) -> Call:
        return newest_part, (x, at, dims, new), {}

    return Parts(DECODING, part, attention)


def _in_the_way(captured: Captured, axes: Axes, layout: Layout, value_of: ValueOf) -> Fault | None:
    for node, op in axes.ops.items():
        if node.op != "call_function" or op.constant:
            continue
        why = stands_in_the_way(op, axes, layout)
        if why is None and op.attends is not None and layout.touches(op.shapes()):
            why = _looks_ahead(captured, op, value_of)
        if why is not None:
            return Fault("task", "generate", f"{op.name}{in_source(node)} {why}", FIX)
    return None


def _looks_ahead(captured: Captured, op: Op, value_of: ValueOf) -> str | None:
    """Why an attention may see later tokens; None where it cannot."""
    given, _ = arguments_of_attention(op, op.node.args, op.node.kwargs)
    if given[4]:
        return None
    node = attention_mask(op.node)
    mask = find_value(captured, node, value_of) if node is not None else None
    if mask is None:
        return "lets tokens see later ones"
    hidden = ~mask if mask.dtype == torch.bool else mask <= torch.finfo(mask.dtype).min
    length = int(operand(op.node, 0).meta["val"].shape[-2])
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    return None if bool(hidden.expand(*hidden.shape[:-2], length, length)[..., later].all()) else "sees later tokens"
