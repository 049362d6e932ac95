"""Put parts of a graph into graphs of their own.

In:  a graph, and disjoint sets of its nodes, each with a name.
Out: the graph with one call_module node in place of each set, and by its name the set as a graph. Parameters and
     constants that only one set reads are read inside it; a parameter with readers elsewhere too is handed in.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Collection, Mapping

from torch import fx


def outline(
    graph: fx.Graph, parts: Mapping[str, Collection[fx.Node]], bound: Collection[str] = ()
) -> tuple[fx.Graph, dict[str, fx.Graph]]:
    """parts: name -> nodes. A part through which data flows twice (out of it and back in) stays where it is.

    bound: get_attr targets that are no tensors, of which every graph reads its own.
    """
    home = {node: name for name, nodes in parts.items() for node in nodes}
    _sink(graph, home, bound)
    order = _order(graph, home)
    while order is None:
        home = _without_loops(graph, home)
        order = _order(graph, home)

    outer, env = fx.Graph(), {}
    inner: dict[str, fx.Graph] = {}
    for item in order:
        if isinstance(item, fx.Node):
            env[item] = outer.node_copy(item, env.__getitem__)
            continue
        members = [n for n in graph.nodes if home.get(n) == item]
        inner[item], inputs, outputs = _extract(members, bound)
        call = outer.call_module(item, tuple(env[n] for n in inputs))
        for i, node in enumerate(outputs):
            env[node] = call if len(outputs) == 1 else outer.call_function(operator.getitem, (call, i))
            env[node].meta = dict(node.meta)
    outer.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output", "call_module"))
    return outer, inner


def _sink(graph: fx.Graph, home: dict[fx.Node, str], bound: Collection[str]) -> None:
    """What only one part reads, and needs nothing but stored tensors for, moves into it."""
    readers: dict[str, set[str | None]] = {}
    for node in graph.nodes:
        if node.op == "get_attr":
            readers.setdefault(node.target, set()).update(home.get(user) for user in node.users)
    for node in reversed(list(graph.nodes)):
        is_value = node.op == "call_function" and node.meta.get("grad") and not node.meta.get("constant")
        if node in home or node.op in ("placeholder", "output") or is_value:
            continue
        users = {home.get(user) for user in node.users}
        alone = len(users) == 1 and None not in users
        if node.op == "get_attr":
            alone = alone and (len(readers[node.target]) == 1 or node.target in bound)
        if alone and (node.op == "get_attr" or not _depends_on_parts(node, home)):
            home[node] = users.pop()  # type: ignore[assignment]


def _depends_on_parts(node: fx.Node, home: Mapping[fx.Node, str]) -> bool:
    stack, seen = list(node.all_input_nodes), set()
    while stack:
        one = stack.pop()
        if one in home:
            return True
        if one not in seen:
            seen.add(one)
            stack.extend(one.all_input_nodes)
    return False


def _order(graph: fx.Graph, home: Mapping[fx.Node, str]) -> list[fx.Node | str] | None:
    """Nodes and parts so that each follows what it reads, otherwise as they were; None where parts form a loop."""
    place: dict[fx.Node | str, int] = {}
    waits: dict[fx.Node | str, set[fx.Node | str]] = {}
    leads: dict[fx.Node | str, set[fx.Node | str]] = {}
    for i, node in enumerate(graph.nodes):
        item = home.get(node, node)
        place[item] = i  # a part stands where its last node stood
        inputs = {home.get(n, n) for n in node.all_input_nodes} - {item}
        waits.setdefault(item, set()).update(inputs)
        for one in inputs:
            leads.setdefault(one, set()).add(item)
    at = {i: item for item, i in place.items()}
    ready = [place[item] for item, inputs in waits.items() if not inputs]
    heapq.heapify(ready)
    order: list[fx.Node | str] = []
    while ready:
        item = at[heapq.heappop(ready)]
        order.append(item)
        for after in leads.get(item, ()):
            waits[after].discard(item)
            if not waits[after]:
                heapq.heappush(ready, place[after])
    return order if len(order) == len(waits) else None


def _without_loops(graph: fx.Graph, home: Mapping[fx.Node, str]) -> dict[fx.Node, str]:
    """Without the first part that reads what depends on itself."""
    for name in dict.fromkeys(home.values()):
        behind: set[fx.Node] = set()
        for node in graph.nodes:
            inside = home.get(node) == name
            if inside and any(n in behind for n in node.all_input_nodes):
                return {n: part for n, part in home.items() if part != name}
            if not inside and any(n in behind or home.get(n) == name for n in node.all_input_nodes):
                behind.add(node)
    raise AssertionError("parts that wait for each other, though none for itself")


def _extract(members: list[fx.Node], bound: Collection[str]) -> tuple[fx.Graph, list[fx.Node], list[fx.Node]]:
    """A part as a graph, the values that it is given and those that others read."""
    inside = set(members)
    inputs = list(dict.fromkeys(n for m in members for n in m.all_input_nodes if n not in inside))
    handed = [n for n in inputs if not (n.op == "get_attr" and n.target in bound)]
    outputs = [m for m in members if m.op != "get_attr" and any(u not in inside for u in m.users)]
    graph, env = fx.Graph(), {}
    for i, node in enumerate(handed):
        env[node] = graph.placeholder(f"given_{i}")
        env[node].meta = dict(node.meta)
    for node in inputs:
        if node not in env:
            env[node] = graph.node_copy(node)
    for node in members:
        env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(env[outputs[0]] if len(outputs) == 1 else tuple(env[n] for n in outputs))
    return graph, handed, outputs
