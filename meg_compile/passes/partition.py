"""Cut a graph into pipeline stages.

In:  a graph over local tensors with its values' shapes.
Out: one graph per stage. A stage receives the activations that cross its start, reads the batch's fields that it
     needs, and returns the activations that cross its end, or the loss. What depends on no activation (positions,
     masks, a parameter's cast) is computed again in every stage that reads it, rather than sent.

Cuts lie between layers: a layer is what runs inside one numbered block of the model ("h.3"); what comes before the
first belongs to it, what comes after the last to that. A model without blocks is cut where all of its activations
pass through one value.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

import networkx as nx
import torch
from torch import fx

from meg_compile.errors import Fault, Refused
from meg_compile.graph.cost import cost
from meg_compile.graph.nodes import BOUND, locate
from meg_compile.plan import Plan


@dataclass
class Stage:
    """One pipeline stage.

    graph:    placeholders are the received activations (`received`), then fields of the batch (`fields`).
    received: the activations that come from the stage before, on meta, with the shapes of one rank.
    sent:     those that go to the next; empty for the last stage, which returns the loss.
    params:   names of the parameters and buffers that it reads.
    layers:   the layers that it runs, in order.
    cost:     its share of a step, in floating-point operations.
    """

    index: int
    graph: fx.Graph
    received: tuple[torch.Tensor, ...]
    sent: tuple[torch.Tensor, ...]
    fields: tuple[str, ...]
    params: tuple[str, ...]
    layers: tuple[str, ...]
    cost: float


@dataclass
class _Layer:
    """Consecutive activations that stay on one stage. `prologue` and `epilogue` are what no block holds."""

    name: str
    nodes: list[fx.Node]

    @property
    def cost(self) -> float:
        return sum(map(cost, self.nodes))


def partition(graph: fx.Graph, plan: Plan) -> list[Stage]:
    """Refused where the model has fewer layers than the plan has stages, or plan.stages does not add up."""
    layers = find_layers(graph)
    counts = _counts(layers, plan)
    groups, start = [], 0
    for count in counts:
        groups.append(layers[start : start + count])
        start += count
    return [_stage(graph, groups, i) for i in range(len(groups))]


def find_layers(graph: fx.Graph) -> list[_Layer]:
    """The model's layers in order; between them they hold every activation.

    Leaves in meta["layer"] in which layer's own code an activation is made; "" for what no block holds.
    """
    order = find_activations(graph)
    layers: list[_Layer] = []
    for node in order:
        name = _block(node)
        if not layers or (name and layers[-1].name != name):
            layers.append(_Layer(name, []))
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
    return layers


def find_activations(graph: fx.Graph) -> list[fx.Node]:
    """Values that depend on both data and parameters, in order: what flows from stage to stage."""
    found: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if node.op == "call_function":
            differentiable = node.meta.get("grad") and not node.meta.get("constant")
            if differentiable or any(n in found for n in node.all_input_nodes):
                found[node] = None
    return list(found)


def _block(node: fx.Node) -> str:
    """The numbered block that a node runs in: its module path up to the first number."""
    match = re.match(r"(?:[^.]+\.)*?\d+(?=\.|$)", locate(node))
    return match.group() if match else ""


def _layers_by_dominators(order: list[fx.Node]) -> list[_Layer]:
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
    layers, open_until = [_Layer("", [])], -1
    for i, node in enumerate(order):
        layers[-1].nodes.append(node)
        alone = node in through and open_until <= i
        open_until = max(open_until, last_use[node])
        if alone:
            layers[-1].name = locate(node) or node.name
            layers.append(_Layer("", []))
    return [layer for layer in layers if layer.nodes]


def _counts(layers: list[_Layer], plan: Plan) -> list[int]:
    """How many layers each stage runs."""
    if plan.stages is not None:
        if len(plan.stages) != plan.num_stages or sum(plan.stages) != len(layers) or min(plan.stages) < 1:
            raise Refused(
                Fault(
                    "plan.stages",
                    list(plan.stages),
                    f"must cut {len(layers)} layers into {plan.num_stages} stages of at least one layer",
                    f"for example {_even(len(layers), plan.num_stages)}",
                )
            )
        return list(plan.stages)
    if len(layers) < plan.num_stages:
        key = "plan.pp" if plan.vpp == 1 else "plan.pp x plan.vpp"
        raise Refused(
            Fault(
                key,
                plan.num_stages,
                f"is more stages than the model's {len(layers)} layers",
                f"use at most {len(layers)}",
            )
        )
    return balance([layer.cost for layer in layers], plan.num_stages)


def balance(costs: list[float], num_stages: int) -> list[int]:
    """Consecutive counts, each at least 1, that make the dearest stage as cheap as can be, then the others alike."""
    total = [0.0]
    for value in costs:
        total.append(total[-1] + value)

    @cache
    def best(stages: int, end: int) -> tuple[float, float, tuple[int, ...]]:
        if stages == 1:
            return total[end], total[end] ** 2, (end,)
        options = []
        for start in range(stages - 1, end):
            most, squares, counts = best(stages - 1, start)
            own = total[end] - total[start]
            options.append((max(most, own), squares + own**2, (*counts, end - start)))
        return min(options)

    return list(best(num_stages, len(costs))[2])


def _even(num_layers: int, num_stages: int) -> list[int]:
    small, more = divmod(num_layers, num_stages)
    return [small + (i < more) for i in range(num_stages)]


def _stage(graph: fx.Graph, groups: list[list[_Layer]], index: int) -> Stage:
    home = {node: i for i, group in enumerate(groups) for layer in group for node in layer.nodes}
    received = _crossing(home, index)
    sent = _crossing(home, index + 1)
    last = index == len(groups) - 1
    output = next(n for n in reversed(graph.nodes) if n.op == "output")
    wanted = list(output.all_input_nodes) if last else sent

    needed, stack = set(), list(wanted)
    while stack:
        node = stack.pop()
        if node not in needed and node not in received:
            needed.add(node)
            stack.extend(node.all_input_nodes)

    new, env = fx.Graph(), {}
    for i, node in enumerate(received):
        env[node] = new.placeholder(f"received_{i}")
        env[node].meta = dict(node.meta)
    for node in graph.nodes:
        if node in needed and node.op == "placeholder":
            env[node] = new.placeholder(node.target)
            env[node].meta = dict(node.meta)
    for node in graph.nodes:
        if node in needed and node.op != "placeholder":
            env[node] = new.node_copy(node, env.__getitem__)
    new.output(env[wanted[0]] if len(wanted) == 1 else tuple(env[n] for n in wanted))
    return Stage(
        index,
        new,
        tuple(n.meta["val"] for n in received),
        tuple(n.meta["val"] for n in sent),
        tuple(n.target for n in graph.nodes if n in needed and n.op == "placeholder"),
        tuple(n.target for n in graph.nodes if n in needed and n.op == "get_attr" and n.target not in BOUND),
        tuple(layer.name for layer in groups[index]),
        sum(layer.cost for layer in groups[index]),
    )


def _crossing(home: dict[fx.Node, int], stage: int) -> list[fx.Node]:
    """The activations made before a stage that it or a later one reads."""
    return [n for n, i in home.items() if i < stage and any(home.get(u, -1) >= stage for u in n.users)]
