"""Half precision: a stage reads working copies of float32 masters, and gradients reach the masters in float32.

The masters are the leaves: autograd adds the gradients of micro-batches in their dtype, whatever the schedule.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
from torch import fx

COPY = "_working."
"""What the name of a working copy starts with; the rest is the master's."""


class _Working(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, master: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
        ctx.dtype = master.dtype
        return copy.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad.to(ctx.dtype), None


def working(master: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
    """The copy's memory as a function of the master: forward the copy, backward the gradient in the master's dtype."""
    return _Working.apply(master, copy)


def read_copies(graph: fx.Graph, names: Container[str]) -> None:
    """Read every parameter that has a working copy in `names` through it, in place."""
    for node in graph.find_nodes(op="get_attr"):
        if f"{COPY}{node.target}" not in names:
            continue
        with graph.inserting_after(node):
            copy = graph.get_attr(f"{COPY}{node.target}")
        with graph.inserting_after(copy):
            low = graph.call_function(working, (node, copy))
        node.replace_all_uses_with(low, delete_user_cb=lambda user, low=low: user is not low)
        low.meta = dict(node.meta)
