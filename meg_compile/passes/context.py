"""Context parallelism: the sequence shared out over the cp ranks, everywhere.

In:  a captured graph over whole sequences and its axes.
Out: a graph over a rank's part of every sequence, the same on every rank. Operators that need no position but their own
     run on the part; attention gathers its keys and values; what parameters and literals alone give is whole, and
     readers of the data take their part of it. The loss is a sum over the rank's own tokens.
"""

from __future__ import annotations

import torch
from torch import fx

from meg_compile.axes.infer import Axes, infer
from meg_compile.axes.layout import Layout
from meg_compile.axes.op import Op
from meg_compile.errors import Fault, Refused
from meg_compile.graph.capture import Captured
from meg_compile.graph.nodes import CP, in_source
from meg_compile.ops.context import context_attention, context_part
from meg_compile.ops.group import Group, own_chunks
from meg_compile.passes.check import check_shapes
from meg_compile.passes.dropout import places
from meg_compile.passes.parts import Call, Parts, arguments_of_attention, on_parts, stands_in_the_way
from meg_compile.passes.sequence import Sequence, find_sequences, why_not_found
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
    captured.graph = on_parts(captured.graph, axes, layout, _shared(axes, layout))
    check_shapes(captured.graph, plan, {name: tensor.to("meta") for name, tensor in captured.tensors.items()})
    return infer(captured.graph, captured.tensors), fields


def _shared(axes: Axes, layout: Layout) -> Parts:
    """Each rank has its chunks of every sequence; attention gathers the keys and values of all."""

    def attention(op: Op, cp: fx.Node, args: tuple, kwargs: dict) -> Call:
        given, draw = arguments_of_attention(op, args, kwargs)
        if draw:
            draw.append(places(op, axes, layout, "cp", keys_whole=True)[0])
        return context_attention, (*given, cp, *draw), {}

    def part(x: fx.Node, cp: fx.Node, dims: list) -> Call:
        return context_part, (x, cp, dims), {}

    return Parts(CP, part, attention, lambda op: places(op, axes, layout, "cp")[0])


def _faults(axes: Axes, layout: Layout, plan: Plan, sums_tokens: bool) -> list[Fault]:
    if not layout.sharded:
        return [Fault("plan.cp", plan.cp, why_not_found(axes), "use plan.cp=1")]
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
        is_loss = any(user.op == "output" for user in node.users)
        if node.op != "call_function" or op.constant or is_loss:
            continue
        if why := stands_in_the_way(op, axes, layout):
            problem = f"{op.name}{in_source(node)} {why}"
            faults.append(Fault("plan.cp", plan.cp, problem, "use plan.cp=1"))
    return list(dict.fromkeys(faults))[:5]


def take_parts(batch: dict[str, torch.Tensor], fields: Fields, cp: Group) -> dict[str, torch.Tensor]:
    """A batch with this rank's part of each field's sequence."""

    def part(value: torch.Tensor, dim: int, before: int) -> torch.Tensor:
        return own_chunks(value.unflatten(dim, (before, -1)), dim + 1, cp).flatten(dim, dim + 1)

    return {name: part(value, *fields[name]) if name in fields else value for name, value in batch.items()}
