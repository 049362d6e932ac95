"""A stage's graph bound to one rank: its tensors, its tp group, its device."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
from torch import fx, nn

from meg_compile.graph.clean import retarget
from meg_compile.ops.dropout import ShardRng
from meg_compile.ops.group import Group
from meg_compile.ops.later import Later, addmm_later, linear_later
from meg_compile.passes.partition import Stage
from meg_compile.passes.tensor import RNG, TP


class StageModule(nn.Module):
    """Runs one stage: received activations by position, the batch's fields by name; others are ignored.

    `body` holds the rank's parameters under the user's own names. `later` keeps the weight gradients that backward
    leaves for later, where the schedule runs it in two parts.
    """

    def __init__(self, stage: Stage, body: fx.GraphModule, later: Later | None):
        super().__init__()
        self.body = body
        self.fields = stage.fields
        self.later = later

    def forward(self, *received: torch.Tensor, **fields: torch.Tensor) -> Any:
        return self.body(*received, **{name: fields[name] for name in self.fields})


def bind(
    stage: Stage,
    tensors: dict[str, torch.Tensor],
    tp: Group,
    rng: ShardRng | None,
    device: torch.device,
    in_two_parts: bool = False,
) -> StageModule:
    """Make a stage runnable on a rank. `tensors` are the rank's own, shared between its stages.

    in_two_parts: the gradients of the weights of matrix products wait until the schedule asks for them.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(stage.graph, {}))
    retarget(graph, device)
    root: dict[str, Any] = {name: tensors[name] for name in stage.params}
    root |= {TP: tp, RNG: rng}
    later = None
    if in_two_parts:
        trainable = {n: t for n, t in tensors.items() if isinstance(t, nn.Parameter) and t.requires_grad}
        root[LATER] = later = Later(trainable.values())
        _leave_weights(graph, trainable)
    return StageModule(stage, fx.GraphModule(root, graph, f"Stage{stage.index}"), later)


def _leave_weights(graph: fx.Graph, trainable: Container[str]) -> None:
    """Turn the matrix products with a trainable parameter into those that leave its gradient for later, in place."""
    for node in list(graph.nodes):
        if node.target in _PRODUCTS and not node.kwargs:
            product, at, num = _PRODUCTS[node.target]
            weight = node.args[at]
            vector = at == 1 or node.args[0].meta["val"].dim() == 1
            if weight.op == "get_attr" and weight.target in trainable and vector:
                with graph.inserting_before(node):
                    args = (*node.args, *[None] * (num - len(node.args)), graph.get_attr(LATER))
                    new = graph.call_function(product, args)
                new.meta = dict(node.meta)
                node.replace_all_uses_with(new)
                graph.erase_node(node)


LATER = "later"
_PRODUCTS = {  # operator: (the one that leaves the weight's gradient for later, where the weight stands, arguments)
    torch.ops.aten.linear.default: (linear_later, 1, 3),
    torch.ops.aten.addmm.default: (addmm_later, 2, 3),
}
