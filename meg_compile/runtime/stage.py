"""A stage's graph bound to one rank: its tensors, its tp group, its device; block by block."""

from __future__ import annotations

from collections.abc import Container, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx, nn

from meg_compile.graph.clean import retarget
from meg_compile.graph.nodes import BOUND, CP, LATER, RNG
from meg_compile.ops.later import Later, addmm_later, linear_later
from meg_compile.passes.blocks import find_blocks, find_cores
from meg_compile.passes.in_place import not_across
from meg_compile.passes.outline import outline
from meg_compile.passes.partition import Stage
from meg_compile.plan import Plan
from meg_compile.runtime.precision import read_copies
from meg_compile.runtime.recompute import Recomputed
from meg_compile.runtime.regather import Regather
from meg_compile.runtime.watch import progress
from meg_compile.schedules import SCHEDULES


class StageModule(nn.Module):
    """Called with the received activations in order and the batch's fields by name.

    Fields of other stages of the same rank may be given too; they are left out. `blocks` are the parts of it that are
    modules of their own. regather: keep parts of the sequence for backward, rather than what was gathered of them.
    `later` keeps the weight gradients that backward leaves for later, where the schedule runs it in two parts.
    """

    def __init__(
        self, stage: Stage, body: fx.GraphModule, blocks: list[nn.Module], regather: bool, later: Later | None
    ):
        super().__init__()
        self.regather = regather
        self.body = body
        self.fields = stage.fields
        self.blocks = blocks
        self.later = later

    def forward(self, *received: torch.Tensor, **fields: torch.Tensor) -> Any:
        progress()
        with Regather() if self.regather else nullcontext():
            return self.body(*received, **{name: fields[name] for name in self.fields})


def bind(
    stage: Stage,
    plan: Plan,
    tensors: Mapping[str, torch.Tensor],
    bound: Mapping[str, Any],
    device: torch.device,
    compiled: bool = False,
) -> StageModule:
    """Make a stage runnable on a rank.

    tensors: the rank's own and their working copies, shared between its stages. bound: what the names in `BOUND` stand
    for on it. compiled: its blocks go through torch.compile.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(stage.graph, {}))
    retarget(graph, device)
    later = None
    masters: dict[str, torch.Tensor] = {}
    if plan.pp > 1 and SCHEDULES[plan.schedule].splits:
        trainable = {n: t for n, t in tensors.items() if isinstance(t, nn.Parameter) and t.requires_grad}
        later = Later(trainable.values())
        if plan.zero == 0 or plan.dp == 1:  # FSDP2 must see every gradient
            masters = {f"{MASTER}{name}": tensor for name, tensor in trainable.items()}
            _leave_weights(graph, trainable)
    bound = {**bound, LATER: later}
    values = {**tensors, **masters, **bound}
    parts = find_blocks(graph)
    if plan.recompute != "none" or plan.zero:
        not_across(graph, parts)
    outer, inner = outline(graph, parts, BOUND)
    blocks: dict[str, nn.Module] = {}
    for i, (name, block) in enumerate(inner.items()):
        recompute = plan.recompute if i % plan.recompute_every == 0 else "none"
        blocks[name] = _block(block, name, recompute, values, compiled)
    body = _module(outer, values | blocks, f"Stage{stage.index}")
    return StageModule(stage, body, list(blocks.values()), plan.sp and plan.tp > 1, later)


def _block(graph: fx.Graph, name: str, recompute: str, values: Mapping[str, Any], compiled: bool) -> nn.Module:
    if recompute == "selective":
        outer, cores = outline(graph, find_cores(graph), BOUND)
        modules = {core: Recomputed(_module(g, values, core)) for core, g in cores.items()}
        block = _module(outer, {**values, **modules}, name)
    else:
        block = _module(graph, values, name)
    if compiled:  # forward alone: hooks of FSDP2 stay outside
        broken = any(
            node.target in (CP, RNG, LATER) for node in graph.nodes
        )  # what reads them may run between two graphs
        block.forward = torch.compile(block.forward, fullgraph=not broken, dynamic=False)
    return Recomputed(block) if recompute == "full" else block


def _module(graph: fx.Graph, values: Mapping[str, Any], name: str) -> fx.GraphModule:
    read_copies(graph, values)
    read = dict.fromkeys(str(n.target) for n in graph.nodes if n.op in ("get_attr", "call_module"))
    return fx.GraphModule({target: values[target] for target in read}, graph, name)


def _leave_weights(graph: fx.Graph, trainable: Container[str]) -> None:
    """Turn the matrix products with a trainable parameter into those that leave its gradient for later, in place."""
    for node in list(graph.nodes):
        if node.target in _PRODUCTS and not node.kwargs:
            product, at, num = _PRODUCTS[node.target]
            weight = node.args[at]
            vector = at == 1 or node.args[0].meta["val"].dim() == 1
            if weight.op == "get_attr" and weight.target in trainable and vector:
                with graph.inserting_before(node):
                    given = (*node.args, *[None] * (num - len(node.args)))
                    args = (*given, graph.get_attr(f"{MASTER}{weight.target}"), graph.get_attr(LATER))
                    new = graph.call_function(product, args)
                new.meta = dict(node.meta)
                node.replace_all_uses_with(new)
                graph.erase_node(node)


MASTER = "_master."
"""What stands before a parameter's name where its gradient is meant, not the copy that is read."""
_PRODUCTS = {  # operator: (the one that leaves the weight's gradient for later, where the weight stands, arguments)
    torch.ops.aten.linear.default: (linear_later, 1, 3),
    torch.ops.aten.addmm.default: (addmm_later, 2, 3),
}
