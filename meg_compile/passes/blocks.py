"""The parts of a stage that are run as one: its blocks, and in them the cores of attention.

A block is what runs inside one layer of the model without leaving it. Blocks are what is recomputed, compiled and
sharded over replicas as a whole; embedding, head and loss stand outside them. A core of attention is what lies between
the product of queries and keys and the product with the values: the largest activations for the fewest operations, so
selective recomputation keeps everything but these (Korthikanti et al. 2022, arXiv:2205.05198, section 5).
"""

from __future__ import annotations

import torch
from torch import fx

from meg_compile.graph.nodes import PRODUCTS, base_name
from meg_compile.plan import Plan

_BETWEEN = set(
    "add sub mul div truediv neg tanh pow exp where masked_fill to _to_copy type_as float expand reshape view "
    "_unsafe_view clone contiguous transpose permute unsqueeze squeeze slice cat dropout sharded_dropout exact_dropout "
    "getitem softmax _softmax".split()
)
_WHOLE = {"scaled_dot_product_attention", "sharded_attention", "exact_attention", "context_attention"}


def find_blocks(graph: fx.Graph) -> dict[str, list[fx.Node]]:
    """The blocks of a stage in order; one whose nodes others interrupt is several."""
    found: dict[str, list[fx.Node]] = {}
    last, name = None, ""
    for node in graph.nodes:
        if node.op != "call_function" or "layer" not in node.meta:
            continue
        layer = node.meta["layer"]
        if layer and layer != last:
            name = part_name(layer)
            while name in found:
                name += "_"
            found[name] = []
        if layer:
            found[name].append(node)
        last = layer
    return found


def find_repeated(graph: fx.Graph, plan: Plan) -> set[fx.Node]:
    """The operators of a stage whose forward backward runs again: of each part that is recomputed, those up to the last
    that keeps something for backward."""
    repeated: set[fx.Node] = set()
    if plan.recompute == "none":
        return repeated
    cores = find_cores(graph).values()
    for i, block in enumerate(find_blocks(graph).values()):
        if i % plan.recompute_every == 0:
            inside = set(block)
            parts = [block] if plan.recompute == "full" else [core for core in cores if inside.issuperset(core)]
            for part in parts:
                keeping = [at for at, node in enumerate(part) if _keeps_something(node)]
                repeated.update(part[: keeping[-1] + 1] if keeping else ())
    return repeated


def _keeps_something(node: fx.Node) -> bool:
    tensors = sum(isinstance(n.meta.get("val"), torch.Tensor) for n in node.all_input_nodes)
    by_a_number = base_name(node.target) in ("mul", "div", "truediv") and tensors < 2
    return bool(node.meta.get("grad")) and base_name(node.target) not in _KEEP_NOTHING and not by_a_number


_KEEP_NOTHING = set(
    """add sub neg to _to_copy reshape view _unsafe_view flatten unflatten transpose permute unsqueeze squeeze expand
    slice split split_with_sizes chunk unbind select cat stack clone contiguous getitem copy_to_tp reduce_from_tp
    gather_to_tp scatter_from_tp gather_sequence cut_sequence part_of context_part""".split()
)


def part_name(layer: str) -> str:
    return "block_" + layer.replace(".", "_")


def find_cores(graph: fx.Graph) -> dict[str, list[fx.Node]]:
    """The cores of attention in a graph: one operator, or all from a product through a softmax to a product."""
    found: dict[str, list[fx.Node]] = {}
    taken: set[fx.Node] = set()
    for node in graph.nodes:
        name = base_name(node.target) if node.op == "call_function" else ""
        core = [node] if name in _WHOLE else _around(node) if name in ("softmax", "_softmax") else []
        if core and not taken & set(core):
            found[f"core_{len(found)}"] = core
            taken.update(core)
    return found


def _around(softmax: fx.Node) -> list[fx.Node]:
    before, after = _reach(softmax, up=True), _reach(softmax, up=False)
    if before is None or after is None:
        return []
    inside = before | after | {softmax}
    return [n for n in softmax.graph.nodes if n in inside]


def _reach(start: fx.Node, up: bool) -> set[fx.Node] | None:
    """Nodes from the softmax to the nearest products of two activations; None where there are none."""
    found: set[fx.Node] = set()
    products = 0
    stack = [start]
    while stack:
        node = stack.pop()
        for near in node.all_input_nodes if up else node.users:
            if near in found or not _is_activation(near):
                continue
            name = base_name(near.target)
            if name not in _BETWEEN | PRODUCTS:
                return None
            found.add(near)
            if name in PRODUCTS:
                products += 1
            else:
                stack.append(near)
    return found if products else None


def _is_activation(node: fx.Node) -> bool:
    return node.op == "output" or bool(node.meta.get("grad") and not node.meta.get("constant"))
