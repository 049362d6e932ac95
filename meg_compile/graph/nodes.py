"""Reading a node: what its operator is called, and where in the user's model it comes from."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import fx

TP, CP, RNG, LATER, DECODING = "tp_group", "cp_group", "shard_rng", "later", "decoding"
BOUND = (TP, CP, RNG, LATER, DECODING)
"""get_attr nodes that are no tensors: bound to a rank's groups, its ShardRng, the weight gradients that its stage
leaves for later and where decoding stands, when it materialises the graph."""

PRODUCTS = {"linear", "mm", "addmm", "bmm", "baddbmm", "matmul", "einsum"}
"""Operators whose gradient for one operand needs another operand."""


OURS = ("aten", "prims", "meg_compile")


def base_name(target: Any) -> str:
    """An operator's name without overload or the underscore of its in-place form; one that is not torch's or ours with
    its namespace ("mylib::softmax"), so that it is not taken for torch's."""
    name = getattr(target, "_opname", None) or getattr(target, "__name__", str(target))
    namespace = getattr(target, "namespace", "aten")
    if isinstance(namespace, str) and namespace not in OURS:
        return f"{namespace}::{name}"
    return name if name.startswith("__") else name.rstrip("_")


def operand(node: fx.Node, at: int) -> fx.Node:
    """A positional argument that is itself a node."""
    found = node.args[at]
    assert isinstance(found, fx.Node), f"argument {at} of {node.format_node()} is no node"
    return found


def upstream(nodes: Iterable[fx.Node], given: Collection[fx.Node] = ()) -> set[fx.Node]:
    """All that nodes are computed from, themselves among it; not looking behind what is `given`, which is left out."""
    found: set[fx.Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in found and node not in given:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return found


def is_random(node: fx.Node) -> bool:
    """Whether an operator draws from a random number generator."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def is_entry_by_entry(node: fx.Node) -> bool:
    """Whether a custom autograd Function is known to work on each entry alone (`meg_compile.graph.functions`)."""
    return getattr(node.target, "is_entry_by_entry", False)


def can_have_gradient(value: Any) -> bool:
    """Whether a value is a tensor of numbers that autograd follows: real or complex ones."""
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def attention_mask(node: fx.Node) -> fx.Node | None:
    """The mask of an attention, where it is a value of the graph."""
    found = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
    return found if isinstance(found, fx.Node) else None


def locate(node: fx.Node) -> str:
    """The module path in which a node's operator was called ("h.0.attn.c_attn"); "" for the root."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values()]
    return module_path(paths[-1]) if paths else ""


def module_path(path: str) -> str:
    """A module path as the user knows it, without the wrapper that capture puts around the model."""
    return path.removeprefix("L['self'].").removeprefix("model").removeprefix(".")


def matches(pattern: str, path: str) -> bool:
    """Whether a glob is for a dotted path or for a module that it lies in: "h.*.mlp" for "h.0.mlp.fc1.weight" too."""
    parts = path.split(".")
    return any(fnmatchcase(".".join(parts[:end]), pattern) for end in range(1, len(parts) + 1))


def starred(path: str) -> str:
    """A module path without its block numbers: h.3.mlp -> h.*.mlp."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)


def in_source(node: fx.Node) -> str:
    """ " (file.py:line)" of the user's own code, to follow an operator's name; "" where none is known."""
    line = source_line(node)
    return f" ({line})" if line else ""


def source_line(node: fx.Node) -> str:
    """file.py:line of the user's (or the model's) own code that a node comes from; "" where none is known."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    own = [(f, n) for f, n in frames if "/torch/" not in f and not f.endswith("graph/capture.py")]
    return f"{Path(own[-1][0]).name}:{own[-1][1]}" if own else ""
