"""What a node costs: multiply-adds and bytes touched, forward and backward, from the values' shapes."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import fx

from meg_compile.graph.nodes import base_name

FLOPS_PER_BYTE = 10.0
"""Floating-point operations a machine does while it moves one byte of memory; between a CPU core's 5 and a GPU's 100.
It only weighs one kind of work against the other when stages are balanced."""

_MATRIX = {"linear", "mm", "addmm", "bmm", "baddbmm", "matmul", "einsum"}


def flops(node: fx.Node) -> int:
    """Floating-point operations of a node's forward (a multiply-add is two); 0 for what only moves memory."""
    if node.op != "call_function":
        return 0
    name = base_name(node.target)
    shapes = [tuple(n.meta["val"].shape) for n in node.all_input_nodes if _is_tensor(n.meta.get("val"))]
    out: Any = node.meta.get("val")
    if name in _MATRIX and _is_tensor(out):
        bias = 1 if name in ("addmm", "baddbmm") else 0
        operands = shapes[bias : bias + 2]
        batch_and_rows = prod(out.shape)
        shared = prod(operands[0]) * prod(operands[1]) / max(batch_and_rows, 1)
        batch = prod(out.shape[:-2]) if len(operands[1]) > 2 else 1
        return int(2 * batch_and_rows * round((shared / batch) ** 0.5))
    if name in ("scaled_dot_product_attention", "sharded_attention"):
        q, k = shapes[0], shapes[1]
        return 4 * prod(q) * k[-2]
    return 0


def moved(node: fx.Node) -> int:
    """Bytes that a node's forward reads and writes, views aside."""
    if node.op != "call_function" or base_name(node.target) in _VIEWS:
        return 0
    values: list[Any] = [n.meta.get("val") for n in (node, *node.all_input_nodes)]
    return sum(v.numel() * v.element_size() for v in values if _is_tensor(v))


_VIEWS = {
    "view",
    "reshape",
    "transpose",
    "permute",
    "t",
    "expand",
    "unsqueeze",
    "squeeze",
    "flatten",
    "copy_to_tp",
}


def cost(node: fx.Node) -> float:
    """A node's share of a training step, in floating-point operations: backward costs about twice the forward."""
    return 3.0 * (flops(node) + FLOPS_PER_BYTE * moved(node))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
