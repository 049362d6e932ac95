"""A stage's graph bound to one rank: its tensors, its tp group, its device."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from meg_compile.graph.clean import retarget
from meg_compile.ops.dropout import ShardRng
from meg_compile.ops.group import Group
from meg_compile.passes.partition import Stage
from meg_compile.passes.tensor import RNG, TP


class StageModule(nn.Module):
    """Runs one stage: received activations by position, the batch's fields by name; others are ignored.

    `body` holds the rank's parameters under the user's own names.
    """

    def __init__(self, stage: Stage, body: fx.GraphModule):
        super().__init__()
        self.body = body
        self.fields = stage.fields

    def forward(self, *received: torch.Tensor, **fields: torch.Tensor) -> Any:
        return self.body(*received, **{name: fields[name] for name in self.fields})


def bind(
    stage: Stage, tensors: dict[str, torch.Tensor], tp: Group, rng: ShardRng | None, device: torch.device
) -> StageModule:
    """Make a stage runnable on a rank. `tensors` are the rank's own, shared between its stages."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(stage.graph, {}))
    retarget(graph, device)
    root: dict[str, Any] = {name: tensors[name] for name in stage.params}
    return StageModule(stage, fx.GraphModule(root | {TP: tp, RNG: rng}, graph, f"Stage{stage.index}"))
