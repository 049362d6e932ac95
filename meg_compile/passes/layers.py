"""The layers of a graph, between which it can be cut into stages.

A layer is what runs inside one numbered block of the model ("h.3"); what comes before the first belongs to it, what
comes after the last to that. A model without blocks has its layers end where all of its activations pass through one
value. A model may have several towers of blocks ("encoder", "decoder"): what the second one starts from, such as its
own embedding, belongs to its first block.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

import networkx as nx
from torch import fx

from meg_compile.graph.cost import cost
from meg_compile.graph.nodes import is_random, locate


@dataclass
class Layer:
    """Consecutive activations that stay on one stage. An end of the model, cut off by a layout, has no name."""

    name: str | None
    nodes: list[fx.Node]

    @property
    def cost(self) -> float:
        return sum(map(cost, self.nodes))


def find_layers(graph: fx.Graph) -> list[Layer]:
    """The model's layers in order; between them they hold every activation.

    Leaves in meta["layer"] in which layer's own code an activation is made; "" for what no block holds.
    """
    order = find_activations(graph)
    layers: list[Layer] = []
    for node in order:
        name = _block(node)
        if not layers or (name and layers[-1].name != name):
            layers.append(Layer(name, []))
        layers[-1].nodes.append(node)
    if len(layers) > 1 and not layers[0].name:
        before = layers.pop(0)
        layers[0].nodes[:0] = before.nodes
    names = [layer.name for layer in layers]
    if names == [""] or len(set(names)) != len(names):
        layers = _layers_by_dominators(order)
        for layer in layers:
            for node in layer.nodes:
                node.meta["layer"] = layer.name
        return layers
    for node in order:
        node.meta["layer"] = _block(node)
    for before, layer in itertools.pairwise(layers):
        if _tower(before) != _tower(layer):
            _hand_over(before, layer)
    return layers


def find_towers(layers: list[Layer]) -> dict[str, int]:
    """How many blocks each tower has: {"encoder": 6, "decoder": 6}; empty for a model without blocks."""
    towers: dict[str, int] = {}
    if not any(map(_block, layers[0].nodes)):
        return towers
    for layer in layers:
        towers[_tower(layer)] = towers.get(_tower(layer), 0) + 1
    return towers


def starts_anew(layers: list[Layer]) -> bool:
    """Whether the second tower starts from something that the first has no part in, as from an embedding of its own."""
    begins = [layer for before, layer in itertools.pairwise(layers) if _tower(before) != _tower(layer)]
    return bool(begins) and not _block(begins[0].nodes[0])


def take_ends(layers: list[Layer]) -> dict[str, Layer] | None:
    """What comes before the first block and after the last, as layers E and L, taken out of those two layers, in place.

    None for a model without blocks.
    """
    first, last = layers[0], layers[-1]
    inside = [[bool(_block(node)) for node in layer.nodes] for layer in (first, last)]
    if not all(map(any, inside)):
        return None
    start, end = inside[0].index(True), len(inside[1]) - inside[1][::-1].index(True)
    ends = {"E": Layer(None, first.nodes[:start]), "L": Layer(None, last.nodes[end:])}
    del last.nodes[end:]
    del first.nodes[:start]
    return ends


def _tower(layer: Layer) -> str:
    return (layer.name or "").rpartition(".")[0]


def _hand_over(before: Layer, layer: Layer) -> None:
    """Move what follows the last block of a tower and needs nothing of that tower into the next tower's first layer."""
    end = len(before.nodes)
    while end and not _block(before.nodes[end - 1]):
        end -= 1
    kept, moved = set(before.nodes[:end]), []
    for node in before.nodes[end:]:
        if kept.isdisjoint(node.all_input_nodes):
            moved.append(node)
        else:
            kept.add(node)
    read = {n for node in before.nodes if node in kept for n in node.all_input_nodes}
    if read.isdisjoint(moved):
        before.nodes = [node for node in before.nodes if node in kept]
        layer.nodes[:0] = moved


def find_activations(graph: fx.Graph) -> list[fx.Node]:
    """Values that depend on both data and parameters, in order: what flows from stage to stage. So do random ones, of
    which another stage would draw others."""
    found: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if node.op == "call_function":
            differentiable = node.meta.get("grad") and not node.meta.get("constant")
            if differentiable or is_random(node) or any(n in found for n in node.all_input_nodes):
                found[node] = None
    return list(found)


def _block(node: fx.Node) -> str:
    """The numbered block that a node runs in: its module path up to the first number."""
    match = re.match(r"(?:[^.]+\.)*?\d+(?=\.|$)", locate(node))
    return match.group() if match else ""


def _layers_by_dominators(order: list[fx.Node]) -> list[Layer]:
    """Cut after every value that all activations before it pass through, on every path to the loss."""
    flow = nx.DiGraph()
    members = set(order)
    for node in order:
        inputs = [n for n in node.all_input_nodes if n in members]
        flow.add_edges_from((n, node) for n in inputs or ["data"])
    ahead = nx.immediate_dominators(flow, "data")
    through, node = {order[-1]}, order[-1]
    while (node := ahead[node]) != "data":
        through.add(node)
    place = {n: i for i, n in enumerate(order)}
    last_use = {n: max((place[u] for u in n.users if u in members), default=0) for n in order}
    layers, open_until = [Layer("", [])], -1
    for i, node in enumerate(order):
        layers[-1].nodes.append(node)
        alone = node in through and open_until <= i
        open_until = max(open_until, last_use[node])
        if alone:
            layers[-1].name = locate(node) or node.name
            layers.append(Layer("", []))
    return [layer for layer in layers if layer.nodes]
