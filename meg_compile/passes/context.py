"""Context parallelism: the sequence shared out over the cp ranks, everywhere.

In:  a captured graph over whole sequences and its axes.
Out: a graph over a rank's part of every sequence, the same on every rank. Operators that need no position but their own
     run on the part; attention gathers its keys and values; what parameters and literals alone give is whole, and
     readers of the data take their part of it. The loss is a sum over the rank's own tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from meg_compile.axes.atoms import Dims, atoms, leaves
from meg_compile.axes.infer import Axes, infer
from meg_compile.axes.layout import Layout
from meg_compile.axes.op import Op, each, how_to_add
from meg_compile.errors import Fault, Refused
from meg_compile.graph.capture import Captured
from meg_compile.graph.nodes import CP, attention_mask, in_source
from meg_compile.ops.context import context_attention, context_part
from meg_compile.ops.counted import exact_attention
from meg_compile.ops.group import Group, own_chunks
from meg_compile.passes.check import check_shapes
from meg_compile.passes.dropout import places
from meg_compile.passes.sequence import Sequence, find_sequences
from meg_compile.plan import Plan

Fields = dict[str, tuple[int, int]]
"""Of each field of the batch that has a sequence: its dim, and the entries of that dim's axes before the sequence."""


def share_context(captured: Captured, axes: Axes, plan: Plan, sums_tokens: bool) -> tuple[Axes, Fields]:
    """Rewrites the captured graph; (its axes, where each field of the batch has its sequence).

    Refused, with each operator that stands in the way, where the sequence cannot be shared out.

    sums_tokens: the loss is a sum over tokens.
    """
    if plan.cp == 1:
        return axes, {}
    layout = Layout(plan.cp, find_sequences(axes))
    if faults := _faults(axes, layout, plan, sums_tokens):
        raise Refused(faults)
    sequence = Sequence(layout, layout.sharded, frozenset())
    inputs = {str(n.target): axes.ops[n].out for n in captured.graph.nodes if n.op == "placeholder"}
    fields = {name: at for name, dims in inputs.items() if (at := sequence.at(dims)) is not None}
    captured.graph = _on_parts(captured.graph, axes, layout)
    check_shapes(captured.graph, plan, {name: tensor.to("meta") for name, tensor in captured.tensors.items()})
    return infer(captured.graph, captured.tensors), fields


def _on_parts(graph: fx.Graph, axes: Axes, layout: Layout) -> fx.Graph:
    new, env, parts = fx.Graph(), {}, {}
    group = new.get_attr(CP)

    def read(node: fx.Node, reader: fx.Node) -> fx.Node:
        op = axes.ops[node]
        whole = axes.ops[reader].constant or (axes.ops[reader].attends is not None and node is attention_mask(reader))
        if not op.constant or whole or not layout.touches(each(op.out)):
            return env[node]
        if node not in parts:
            dims = [[(a.size, a in layout.sharded) for a in leaves(dim)] for dim in op.out]
            parts[node] = new.call_function(context_part, (env[node], group, dims))
            parts[node].meta = _described(node, op, layout)
        return parts[node]

    for node in graph.nodes:
        op = axes.ops[node]
        target, args, kwargs = node.target, node.args, node.kwargs
        args, kwargs = map_arg((args, kwargs), lambda n, reader=node: read(n, reader))
        on_parts = node.op == "call_function" and not op.constant and layout.touches(op.shapes())
        if on_parts and op.attends is not None:
            target, args, kwargs = _attention(op, axes, layout, group, args, kwargs)
        elif on_parts and op.drawn is not None:
            args = (*args, places(op, axes, layout, "cp")[0])
        elif on_parts and op.localise is not None:
            target, args, kwargs = op.localise(layout.local, *args, **kwargs)
        env[node] = new.create_node(node.op, target, args, kwargs, node.name)
        env[node].meta = _described(node, op, layout)
        if op.constant:
            env[node].meta["layout"] = Layout(1, frozenset())
    return new


def _described(node: fx.Node, op: Op, layout: Layout) -> dict[str, Any]:
    kept = {key: node.meta[key] for key in ("nn_module_stack", "stack_trace", "val") if key in node.meta}
    return kept | {"dims": op.out, "layout": layout}


def _attention(op: Op, axes: Axes, layout: Layout, group: fx.Node, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    if op.node.target is exact_attention:
        q, k, v, mask, causal, scale, gqa, *draw = args
        draw.append(places(op, axes, layout, "cp", keys_whole=True)[0])
    else:
        q, k, v, mask, _, causal = (*args, *(None, 0.0, False)[len(args) - 3 :])
        mask, causal, draw = kwargs.get("attn_mask", mask), kwargs.get("is_causal", causal), []
        scale, gqa = kwargs.get("scale"), kwargs.get("enable_gqa", False)
    return context_attention, (q, k, v, mask, causal, scale, gqa, group, *draw), {}


def _faults(axes: Axes, layout: Layout, plan: Plan, sums_tokens: bool) -> list[Fault]:
    if not layout.sharded:
        return [Fault("plan.cp", plan.cp, "no sequence of tokens was found in the data", "use plan.cp=1")]
    uneven = sorted({a.size for a in layout.sharded if a.size % (2 * plan.cp)})
    if uneven:
        problem = f"a sequence of {uneven[0]} does not divide into 2 x {plan.cp} chunks"
        return [Fault("plan.cp", plan.cp, problem, f"use a data.seq_len that {2 * plan.cp} divides, or plan.cp=1")]
    if not sums_tokens:
        problem = "the loss is not a cross entropy over tokens, so ranks that share a sequence cannot add theirs up"
        return [Fault("plan.cp", plan.cp, problem, "use plan.cp=1")]
    faults = []
    sequence = Sequence(layout, layout.sharded, frozenset())
    for node, op in axes.ops.items():
        if node.op == "placeholder" and layout.touches([op.out]) and sequence.at(op.out) is None:
            problem = f"the field {node.target} has more than one sequence"
            faults.append(Fault("plan.cp", plan.cp, problem, "use plan.cp=1"))
        if node.op == "call_function" and not op.constant and (why := _stands_in_the_way(op, axes, layout)):
            problem = f"{op.name}{in_source(node)} {why}"
            faults.append(Fault("plan.cp", plan.cp, problem, "use plan.cp=1"))
    return list(dict.fromkeys(faults))[:5]


def _stands_in_the_way(op: Op, axes: Axes, layout: Layout) -> str | None:
    """Why an operator cannot run on parts of the sequence; None where it can."""
    if not layout.touches(op.shapes()):
        return None
    if any(u.op == "output" for u in op.node.users):
        return None  # the loss
    if not op.ruled:
        return f"has no rule, so it is taken to need the whole sequence; {how_to_add(op.name)}"
    if op.attends is not None:
        *inputs, _ = op.attends
        node = attention_mask(op.node)
        if node is not None and not axes.ops[node].constant:
            return "takes a mask that depends on the data"
        plain = all(len(leaves(x[-2])) == 1 and leaves(x[-2])[0] in layout.sharded for x in inputs)
        elsewhere = any(layout.holds(dim) for x in inputs for dim in (*x[:-2], x[-1]))
        return "does not run along the sequence alone" if elsewhere or not plain else None
    twice = [dims for dims in op.shapes() if sum(a in layout.sharded for dim in dims for a in atoms(dim)) > 1]
    if twice:
        return "relates positions to positions; torch's scaled_dot_product_attention is understood"
    if any(layout.holds(dim) for dim in (*op.needed, *op.summed)):
        return "needs the whole sequence"
    if any(not isinstance(dims, Dims) or not layout.touches([dims]) for dims in each(op.out)):
        return "gives a value without the sequence"
    return None


def take_parts(batch: dict[str, torch.Tensor], fields: Fields, cp: Group) -> dict[str, torch.Tensor]:
    """A batch with this rank's part of each field's sequence."""

    def part(value: torch.Tensor, dim: int, before: int) -> torch.Tensor:
        return own_chunks(value.unflatten(dim, (before, -1)), dim + 1, cp).flatten(dim, dim + 1)

    return {name: part(value, *fields[name]) if name in fields else value for name, value in batch.items()}
