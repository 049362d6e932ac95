"""A graph as text: one line per operator, with local shapes, axes and the user's source line.

%f_ln = copy_to_tp(%ln)                       # [8, 128, 768] batch, seq, embed                    model.py:31
%fc   = linear(%f_ln, h.0.mlp.c_fc.weight)    # [8, 128, 1536] batch, seq, ffn/2                   model.py:89
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from meg_compile.axes.atoms import Atom, Dim, Dims, leaves
from meg_compile.axes.layout import Layout
from meg_compile.graph.nodes import BOUND, base_name, source_line


def to_text(nodes: Iterable[fx.Node]) -> str:
    """The operators of a graph, or of a part of one."""
    lines = []
    for node in nodes:
        if node.op == "call_function":
            lines.append((f"%{node.name} = {_call(node)}", describe(node), source_line(node)))
        elif node.op == "placeholder":
            lines.append((f"%{node.name} = input()", describe(node), ""))
        elif node.op == "output":
            lines.append((f"return {_operand(node.args[0])}", "", ""))
    width = max((len(code) for code, text, _ in lines if text), default=0)
    middle = max((len(text) for _, text, _ in lines), default=0)
    return "\n".join(
        f"{code:<{width}}  # {text:<{middle}}  {where}".rstrip() if text else code for code, text, where in lines
    )


def spell(dim: Dim, layout: Layout) -> str:
    """A dim in words: `heads/4 x head_dim` is heads sharded four ways, times head_dim."""
    return " x ".join(_atom(atom, layout) for atom in leaves(dim)) or "1"


def _atom(atom: Atom, layout: Layout) -> str:
    if atom.segments is not None:
        return "(" + " + ".join(spell(segment, layout) for segment in atom.segments) + ")"
    name = "/".join(sorted(atom.names)) or str(atom.size)
    return f"{name}/{layout.tp}" if atom in layout.sharded else name


def describe(node: fx.Node) -> str:
    value, dims = node.meta.get("val"), node.meta.get("dims")
    if not isinstance(value, torch.Tensor):
        return f"{len(value)} tensors" if isinstance(value, (list, tuple)) else ""
    shape = str(list(value.shape))
    if isinstance(dims, Dims):
        return f"{shape} {', '.join(spell(dim, node.meta['layout']) for dim in dims)}".rstrip()
    return f"{shape} partial sum"


def _call(node: fx.Node) -> str:
    args = [_operand(a) for a in node.args if not (isinstance(a, fx.Node) and a.target in BOUND)]
    unsaid = ("device", "pin_memory", "layout", "owned")
    args += [f"{k}={_operand(v)}" for k, v in node.kwargs.items() if k not in unsaid]
    while args and args[-1] == "None":
        args.pop()
    return f"{base_name(node.target)}({', '.join(args)})"


def _operand(value: Any) -> str:
    if isinstance(value, fx.Node):
        return str(value.target) if value.op == "get_attr" else f"%{value.name}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_operand, value))}]"
    return str(value)
