"""What a node costs: floating-point operations and bytes touched, forward and backward, on one rank.

The rewrite leaves in meta["flops"] a node's floating-point operations on one rank, in meta["whole_flops"] those of the
plain model; forward alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import fx

from meg_compile.graph.nodes import base_name
from meg_compile.ops.context import context_attention

FLOPS_PER_BYTE = 10.0
"""Floating-point operations a machine does while it moves one byte of memory; between a CPU core's 5 and a GPU's 100.
It only weighs one kind of work against the other when stages are balanced."""

_VIEWS = {"view", "reshape", "transpose", "permute", "t", "expand", "unsqueeze", "squeeze", "flatten", "copy_to_tp"}


def cost(node: fx.Node) -> float:
    """A node's share of a training step, in floating-point operations: backward costs about twice the forward."""
    return 3.0 * (node.meta.get("flops", 0) + FLOPS_PER_BYTE * moved(node))


class Flops(NamedTuple):
    """Floating-point operations of the plain model's forward, and those of them that tp ranks share out."""

    parallel: int
    total: int

    @property
    def share(self) -> float:
        """Of all, those that run in parallel; 0 for a model without any."""
        return self.parallel / self.total if self.total else 0.0


def count_flops(nodes: Iterable[fx.Node]) -> Flops:
    """Of a rewritten graph's operators, which run in parallel where one rank has less to do than the plain model."""
    found = [(n.meta.get("flops", 0), n.meta.get("whole_flops", 0)) for n in nodes]
    return Flops(sum(whole for own, whole in found if own < whole), sum(whole for _, whole in found))


def training_flops(nodes: Iterable[fx.Node], cp: int) -> int:
    """Floating-point operations of the plain model's forward and backward, of a rewritten graph's operators.

    The gradient of each factor of a product costs as much as the product; one that nobody needs (of a frozen weight,
    of inputs before the first trained parameter) is not computed. cp: ranks that share a sequence; a node says what one
    of them does, and of attention what it does with the keys of its own part.
    """
    found = ((node, node.meta.get("whole_flops", 0) * (1 + _num_gradients(node))) for node in nodes)
    return sum(flops * cp * (cp if node.target is context_attention else 1) for node, flops in found)


def _num_gradients(product: fx.Node) -> int:
    factors = {"linear": product.args[:2], "addmm": product.args[1:3], "baddbmm": product.args[1:3]}
    read = factors.get(base_name(product.target), product.all_input_nodes)
    return min(sum(isinstance(n, fx.Node) and bool(n.meta.get("grad")) for n in read), 2)


def moved(node: fx.Node) -> int:
    """Bytes that a node's forward reads and writes, views aside."""
    if node.op != "call_function" or base_name(node.target) in _VIEWS:
        return 0
    values: list[Any] = [n.meta.get("val") for n in (node, *node.all_input_nodes)]
    return sum(v.numel() * v.element_size() for v in values if isinstance(v, torch.Tensor))
