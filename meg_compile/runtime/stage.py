"""A stage's graph bound to one rank: its tensors, its tp group, its device; block by block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn

from meg_compile.graph.clean import retarget
from meg_compile.passes.blocks import find_blocks, find_cores
from meg_compile.passes.in_place import not_across
from meg_compile.passes.outline import outline
from meg_compile.passes.partition import Stage
from meg_compile.passes.tensor import BOUND
from meg_compile.plan import Plan
from meg_compile.runtime.precision import read_copies
from meg_compile.runtime.recompute import Recomputed


class StageModule(nn.Module):
    """Called with the received activations in order and the batch's fields by name.

    Fields of other stages of the same rank may be given too; they are left out. `blocks` are the parts of it that are
    modules of their own.
    """

    def __init__(self, stage: Stage, body: fx.GraphModule, blocks: list[nn.Module]):
        super().__init__()
        self.body = body
        self.fields = stage.fields
        self.blocks = blocks

    def forward(self, *received: torch.Tensor, **fields: torch.Tensor) -> Any:
        return self.body(*received, **{name: fields[name] for name in self.fields})


def bind(
    stage: Stage, plan: Plan, tensors: Mapping[str, torch.Tensor], bound: Mapping[str, Any], device: torch.device
) -> StageModule:
    """Make a stage runnable on a rank.

    tensors: the rank's own and their working copies, shared between its stages. bound: what the names in `BOUND` stand
    for on it.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(stage.graph, {}))
    retarget(graph, device)
    values = {**tensors, **bound}
    parts = find_blocks(graph)
    if plan.recompute != "none" or plan.zero:
        not_across(graph, parts)
    outer, inner = outline(graph, parts, BOUND)
    blocks: dict[str, nn.Module] = {}
    for i, (name, block) in enumerate(inner.items()):
        recompute = plan.recompute if i % plan.recompute_every == 0 else "none"
        blocks[name] = _block(block, name, recompute, values, bound)
    return StageModule(stage, _module(outer, values | blocks, f"Stage{stage.index}"), list(blocks.values()))


def _block(
    graph: fx.Graph, name: str, recompute: str, values: Mapping[str, Any], bound: Mapping[str, Any]
) -> nn.Module:
    if recompute == "selective":
        outer, cores = outline(graph, find_cores(graph), BOUND)
        modules = {core: Recomputed(_module(g, values, core), bound) for core, g in cores.items()}
        return _module(outer, {**values, **modules}, name)
    block = _module(graph, values, name)
    return Recomputed(block, bound) if recompute == "full" else block


def _module(graph: fx.Graph, values: Mapping[str, Any], name: str) -> fx.GraphModule:
    read_copies(graph, values)
    read = dict.fromkeys(str(n.target) for n in graph.nodes if n.op in ("get_attr", "call_module"))
    return fx.GraphModule({target: values[target] for target in read}, graph, name)
