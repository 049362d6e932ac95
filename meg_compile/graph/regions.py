"""Regions of a captured graph in which gradients are off become plain operators that read detached values.

`torch.export` keeps what ran under torch.no_grad() as a graph of its own inside an operator. Here it is opened: what it
reads is detached, so that no gradient flows through it, whatever else is done to the graph. A region of autocast that
is switched off is opened as it is; one that is switched on is refused, since no graph records what it casts.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from meg_compile.errors import CaptureError, Fault
from meg_compile.graph.nodes import can_have_gradient, source_line

aten = torch.ops.aten
GRAD = torch.ops.higher_order.wrap_with_set_grad_enabled
AUTOCAST = torch.ops.higher_order.wrap_with_autocast


@dataclass
class _Opened:
    """What the values of a region are outside it, where each is with its gradient."""

    graph: fx.Graph
    detached: dict[fx.Node, fx.Node] = field(default_factory=dict)
    without: set[fx.Node] = field(default_factory=set)

    def read(self, node: fx.Node, enabled: bool) -> fx.Node:
        """A value as a region reads it; one detached copy of each, whatever the number of its readers."""
        if enabled or node in self.without or not can_have_gradient(node.meta.get("val")):
            return node
        if node not in self.detached:
            self.detached[node] = self.graph.call_function(aten.detach.default, (node,))
            self.detached[node].meta = dict(node.meta)
            self.without.add(self.detached[node])
        return self.detached[node]


def open_regions(module: fx.GraphModule) -> None:
    """In place. CaptureError for autocast, and for a region that writes to what lies outside it."""
    opened = _Opened(module.graph)
    for node in list(module.graph.nodes):
        if node.target not in (GRAD, AUTOCAST):
            continue
        with module.graph.inserting_before(node):
            results = _open(opened, module, node, node.args, True)
        for user in list(node.users):
            assert user.target is operator.getitem, f"{user.format_node()} reads a region"
            inside, name = results[user.args[1]], user.name
            user.replace_all_uses_with(inside)
            module.graph.erase_node(user)
            if any(reader.op == "output" for reader in inside.users):
                inside.name = name  # the signature of the exported program knows the loss by it
        body = node.args[1 if node.target is GRAD else 4]
        module.graph.erase_node(node)
        if isinstance(body, fx.Node) and not body.users:
            module.graph.erase_node(body)
    module.graph.lint()
    module.recompile()


def _open(opened: _Opened, owner: fx.GraphModule, region: fx.Node, args: Any, enabled: bool) -> list[Any]:
    """The results of a region, whose operators are copied to where the graph inserts; enabled: whether around it
    gradients are."""
    if region.target is GRAD:
        enabled, inner, *values = args
    else:
        _, _, is_on, _, inner, *values = args
        if is_on:
            problem = "runs under torch.autocast, whose casts a graph does not record"
            fix = "leave autocast out, and use precision=bf16 or fp16, or cast with .to(dtype)"
            raise CaptureError(Fault(_place(getattr(owner, inner.target)) or "forward", None, problem, fix))
    body = getattr(owner, inner.target)
    inputs = [n for n in body.graph.nodes if n.op == "placeholder"]
    env: dict[fx.Node, Any] = dict(zip(inputs, values, strict=True))
    outer = {n for n in inputs if isinstance(env[n], fx.Node) and env[n].op != "placeholder"}
    for node in body.graph.nodes:
        if node.op == "output":
            return list(map_arg(node.args[0], env.__getitem__))
        if node.op in ("placeholder", "get_attr"):
            continue
        if node.target in (GRAD, AUTOCAST):
            nested = tuple(
                a if isinstance(a, fx.Node) and a.op == "get_attr" else map_arg(a, env.__getitem__) for a in node.args
            )
            env[node] = _open(opened, body, node, nested, enabled)
        elif node.target is operator.getitem and isinstance(env[node.args[0]], list):
            env[node] = env[node.args[0]][node.args[1]]
        else:
            _refuse_writes(node, outer, enabled)
            env[node] = opened.graph.node_copy(node, lambda n: opened.read(env[n], enabled))
            env[node].meta = dict(node.meta)
            if not enabled:
                opened.without.add(env[node])
    raise AssertionError("a region has no output")


def _refuse_writes(node: fx.Node, outer: set[fx.Node], enabled: bool) -> None:
    """CaptureError where an operator without gradients writes to a value that was computed outside; `outer` grows by
    views of it."""
    schema = getattr(node.target, "_schema", None)
    if enabled or schema is None:
        return
    for at, argument in enumerate(schema.arguments):
        value = node.args[at] if at < len(node.args) else node.kwargs.get(argument.name)
        if isinstance(value, fx.Node) and value in outer and argument.alias_info is not None:
            if argument.alias_info.is_write:
                problem = f"{node.target} writes, without a gradient, to a value that is used with one"
                raise CaptureError(Fault(source_line(node) or "forward", None, problem, "write to a copy of it"))
            outer.add(node)


def _place(body: fx.GraphModule) -> str:
    return next((line for n in body.graph.nodes if (line := source_line(n))), "")
