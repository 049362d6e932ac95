"""Let f, g and the vocabulary-parallel loss work in place where the memory is nobody else's.

In and out: a graph over local tensors; the nodes that may overwrite what they are given get owned=True.
A value is its reader's own where a matrix product or an embedding made it (neither keeps its result for backward) and
there is no other reader, through views too. The gradient that reaches f is f's own where all its readers are matrix
products: each of them makes a new tensor for it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import fx

from meg_compile.graph.nodes import base_name, operand
from meg_compile.ops.collectives import copy_to_tp, reduce_from_tp
from meg_compile.ops.vocabulary import vocab_cross_entropy, vocab_embedding

_ADDING = {"addmm", "baddbmm"}
_PRODUCTS = {"linear", "mm", "bmm", "matmul", *_ADDING}
_VIEWS = {"view", "_unsafe_view", "reshape", "flatten", "slice", "contiguous", "to", "_to_copy"}


def in_place(graph: fx.Graph) -> None:
    """Marks the nodes, in place."""
    for node in graph.nodes:
        if node.target is copy_to_tp:
            owned = all(_multiplies(user, node) for user in node.users)
        elif node.target in (reduce_from_tp, vocab_cross_entropy):
            owned = _is_only_reader(operand(node, 0))
        else:
            continue
        if owned:
            node.kwargs = {"owned": True}


def not_across(graph: fx.Graph, parts: Mapping[str, Collection[fx.Node]]) -> None:
    """Give up what is owned where its memory comes from another part: what a part was given or has returned is kept for
    its backward, by recomputation, by FSDP2 and by a pipeline."""
    home = {node: name for name, nodes in parts.items() for node in nodes}
    for node in graph.nodes:
        if node.target in (reduce_from_tp, vocab_cross_entropy) and node.kwargs.get("owned"):
            path = [operand(node, 0)]
            while base_name(path[-1].target) in _VIEWS:
                path.append(operand(path[-1], 0))
            if any(home.get(value) != home.get(node) for value in path):
                node.kwargs = {}


def _is_only_reader(value: fx.Node) -> bool:
    while len(value.users) == 1 and base_name(value.target) in _VIEWS:
        value = operand(value, 0)
    made_new = value.target is vocab_embedding or base_name(value.target) in _PRODUCTS
    return made_new and len(value.users) == 1


def _multiplies(node: fx.Node, factor: fx.Node) -> bool:
    """Whether a matrix product reads a value as a factor only, not as what it adds."""
    name = base_name(node.target)
    return name in _PRODUCTS and not (name in _ADDING and node.args[0] is factor)
