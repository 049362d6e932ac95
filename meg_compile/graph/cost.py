"""What a node costs: floating-point operations and bytes touched, forward and backward, on one rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from meg_compile.graph.nodes import base_name

FLOPS_PER_BYTE = 10.0
"""Floating-point operations a machine does while it moves one byte of memory; between a CPU core's 5 and a GPU's 100.
It only weighs one kind of work against the other when stages are balanced."""

_VIEWS = {"view", "reshape", "transpose", "permute", "t", "expand", "unsqueeze", "squeeze", "flatten", "copy_to_tp"}


def cost(node: fx.Node) -> float:
    """A node's share of a training step, in floating-point operations: backward costs about twice the forward."""
    return 3.0 * (node.meta.get("flops", 0) + FLOPS_PER_BYTE * moved(node))


def moved(node: fx.Node) -> int:
    """Bytes that a node's forward reads and writes, views aside."""
    if node.op != "call_function" or base_name(node.target) in _VIEWS:
        return 0
    values: list[Any] = [n.meta.get("val") for n in (node, *node.all_input_nodes)]
    return sum(v.numel() * v.element_size() for v in values if isinstance(v, torch.Tensor))
