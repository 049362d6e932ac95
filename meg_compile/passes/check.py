"""A trial run on meta tensors: every value of a rewritten graph has the local shape that its axes predict.

Many a literal that a rewrite forgets runs without an error (view(B, T, 12, -1) makes a head of another size), so that
shapes are compared at every node, always.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from meg_compile.axes.atoms import Dims
from meg_compile.errors import MegError
from meg_compile.graph.clean import retarget
from meg_compile.graph.nodes import CP, DECODING, RNG, TP
from meg_compile.ops.decoding import Decoding
from meg_compile.ops.group import Group
from meg_compile.plan import Plan

META = torch.device("meta")


def check_shapes(graph: fx.Graph, plan: Plan, tensors: dict[str, torch.Tensor]) -> None:
    """Run the graph on meta tensors; leaves every node's local value in meta["val"].

    tensors: the local parameters and buffers, on meta. MegError for a shape that the axes do not predict.
    """
    retarget(graph, META)
    root: dict[str, Any] = {**tensors, TP: Group(plan.tp), CP: Group(plan.cp), RNG: None, DECODING: Decoding(0)}
    inputs = [_local_input(node) for node in graph.nodes if node.op == "placeholder"]
    with torch.no_grad():
        _Trial(root, graph).run(*inputs)


def _local_input(node: fx.Node) -> torch.Tensor:
    shape = [node.meta["layout"].local(dim) for dim in node.meta["dims"]]
    return torch.empty(shape, dtype=node.meta["val"].dtype, device=META)


class _Trial(fx.Interpreter):
    def __init__(self, values: dict[str, Any], graph: fx.Graph):
        super().__init__(torch.nn.Module(), graph=graph)
        self.values = values

    def fetch_attr(self, target: str) -> Any:
        return self.values[target]

    def run_node(self, n: fx.Node) -> Any:
        got = super().run_node(n)
        n.meta["val"] = got
        dims = n.meta.get("dims")
        pairs = zip(got, dims, strict=True) if isinstance(dims, list) else [(got, dims)]
        for value, expected in pairs:
            if isinstance(value, torch.Tensor) and isinstance(expected, Dims):
                local = [n.meta["layout"].local(dim) for dim in expected]
                if list(value.shape) != local:
                    raise MegError(f"{n.format_node()}: shape {list(value.shape)} on a shard, not {local}")
        return got
