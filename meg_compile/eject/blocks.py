"""The repeated blocks of a model as classes: blocks that do the same are one class, with other parameters each."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field

from torch import fx

from meg_compile.eject.expression import Expressions
from meg_compile.eject.function import Body, sites
from meg_compile.graph.nodes import BOUND
from meg_compile.passes.blocks import find_blocks, part_name
from meg_compile.passes.in_place import not_across
from meg_compile.passes.outline import outline


@dataclass
class Block:
    """A call of a block in a stage.

    layer:      its module's path, "h.3".
    kind:       the name of its class.
    first_site: the number of its first dropout; None where it has none.
    """

    layer: str
    kind: str
    first_site: int | None


@dataclass
class Classes:
    """The classes of blocks so far, with the operators that they call. recompute: backward computes blocks again."""

    expressions: Expressions
    cp: bool
    recompute: bool
    sources: dict[str, str] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    layers: dict[str, list[str]] = field(default_factory=dict)
    operators: set[tuple[str, str]] = field(default_factory=set)

    def outline(self, graph: fx.Graph) -> tuple[fx.Graph, dict[str, Block]]:
        """The graph of a stage with a call_module node for every block, and what they call."""
        parts = whole_blocks(graph)
        if self.recompute:
            graph = copy_graph(graph)
            parts = whole_blocks(graph)
            not_across(graph, parts)
        outer, inner = outline(graph, parts, BOUND)
        found = {}
        for node in outer.find_nodes(op="call_module"):
            body = inner[node.target]
            like = next(n for n in body.nodes if n.op == "call_function" and n.meta.get("layer"))
            layer = like.meta["layer"]
            _hand_in(outer, node, body, f"{layer}.")
            first = min(sites(body.nodes), default=None)
            found[node.target] = Block(layer, self._class_of(body, node, layer, _class_name(like, layer), first), first)
        return outer, found

    def _class_of(self, graph: fx.Graph, call: fx.Node, layer: str, wanted: str, first: int | None) -> str:
        body = Body(graph, self.expressions, lambda name: attribute(name.removeprefix(f"{layer}.")), self.cp, first)
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        for node, given in zip(inputs, call.args, strict=True):
            assert isinstance(given, fx.Node)
            is_field = given.op == "placeholder" and not given.name.startswith("received_")
            body.name(node, str(given.target) if is_field or given.op == "get_attr" else "x")
        for node in graph.nodes:
            body.add(node)
        self.operators |= body.operators
        output = next(n for n in reversed(graph.nodes) if n.op == "output")
        value = output.args[0]
        body.line(f"return {', '.join(map(body.spell, value)) if isinstance(value, tuple) else body.spell(value)}")
        names = ["self", *(body.names[n] for n in inputs), *(["site: int"] if first is not None else [])]
        text = f"    def forward({', '.join(names)}):\n{body.text(8)}"
        same = ast.dump(ast.parse(text.replace("    def", "def", 1)))  # comments left out
        if same not in self.kinds:
            kind, i = wanted, 1
            while kind in self.sources:
                i += 1
                kind = f"{wanted}{i}"
            self.kinds[same], self.sources[kind] = kind, text
        self.layers.setdefault(self.kinds[same], []).append(layer)
        return self.kinds[same]


def copy_graph(graph: fx.Graph) -> fx.Graph:
    new = fx.Graph()
    new.output(new.graph_copy(graph, {}))
    return new


def attribute(path: str) -> str:
    """A parameter's path as an attribute of the module that holds it: self.experts[0].weight."""
    text = "self"
    for part in path.split("."):
        if part.isdigit():
            text += f"[{part}]"
        elif part.isidentifier() and not _is_keyword(part):
            text += f".{part}"
        else:
            text = f'getattr({text}, "{part}")'
    return text


def _is_keyword(word: str) -> bool:
    try:
        ast.parse(f"x.{word}")
    except SyntaxError:
        return True
    return False


def whole_blocks(graph: fx.Graph) -> dict[str, list[fx.Node]]:
    """The blocks of a stage that are modules with a number and run in one go."""
    found = find_blocks(graph)
    whole = {}
    for name, nodes in found.items():
        layer = nodes[0].meta["layer"]
        if re.search(r"(^|\.)\d+$", layer) and f"{part_name(layer)}_" not in found and name == part_name(layer):
            whole[name] = nodes
    return whole


def _hand_in(outer: fx.Graph, call: fx.Node, body: fx.Graph, prefix: str) -> None:
    """Have a block given what it reads outside of its own module, in place."""
    last = [node for node in body.nodes if node.op == "placeholder"]
    for node in body.find_nodes(op="get_attr"):
        if node.target in BOUND or str(node.target).startswith(prefix):
            continue
        with body.inserting_before(next(iter(body.nodes))) if not last else body.inserting_after(last[-1]):
            given = body.placeholder(str(node.name))
        given.meta = dict(node.meta)
        last.append(given)
        node.replace_all_uses_with(given)
        body.erase_node(node)
        with outer.inserting_before(call):
            read = outer.get_attr(str(node.target))
        read.meta = dict(node.meta)
        call.args = (*call.args, read)


def _class_name(node: fx.Node, layer: str) -> str:
    """The user's class of a block, as far as the trace of the capture says it."""
    for path, kind in (node.meta.get("nn_module_stack") or {}).values():
        if path.removeprefix("L['self'].").removeprefix("model").removeprefix(".") == layer:
            name = kind if isinstance(kind, str) else kind.__name__
            name = re.sub(r"\W", "_", name.rpartition(".")[2])
            return name if name not in ("Part", "Stage", "Group") and name[:1].isalpha() else f"{name}Block"
    return "Block"
