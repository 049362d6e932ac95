"""Make every dropout of a captured graph one that draws by counters, whatever the plan (`meg_compile.ops.counted`).

In:  a captured graph with ATen's dropout and attention.
Out: the same graph, in place, with exact_dropout and exact_attention, numbered in the order in which the model calls
     them, and with a field of the batch for the keys of the rows. Where a value's axes lie, the rewrite says later.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from meg_compile.axes.atoms import Dim, Dims, leaves
from meg_compile.axes.infer import Axes
from meg_compile.axes.layout import Layout
from meg_compile.axes.op import Op
from meg_compile.errors import Fault, Refused
from meg_compile.graph.capture import Captured
from meg_compile.graph.nodes import base_name, in_source, is_random, operand
from meg_compile.ops.counted import Places, exact_attention, exact_dropout

KEYS = "dropout_keys"
"""The field: int64 [rows, 2] of `meg_compile.ops.counted.row_keys`."""


def draw_by_counters(captured: Captured) -> None:
    """Adds the field `KEYS` where the model has dropout. Refused for other random operators."""
    graph = captured.graph
    random = [n for n in graph.nodes if n.op == "call_function" and _is_random(n)]
    if not random:
        return
    if others := find_noise(graph):
        fix = "use dropout=fast, or torch.nn.functional.dropout in the model"
        raise Refused(
            [Fault("dropout", "exact", f"{other} in a way that depends on the plan", fix) for other in others]
        )
    last = [n for n in graph.nodes if n.op == "placeholder"][-1]
    with graph.inserting_after(last):
        keys = graph.placeholder(KEYS)
    keys.meta["val"] = torch.empty(last.meta["val"].shape[0], 2, dtype=torch.int64, device="meta")
    for site, node in enumerate(random):
        _replace(node, keys, site)
    captured.fields = (*captured.fields, KEYS)


def _is_random(node: fx.Node) -> bool:
    if base_name(node.target) == "scaled_dot_product_attention":
        return len(node.args) > 4 and bool(node.args[4])
    return is_random(node)


def _is_known(node: fx.Node) -> bool:
    if base_name(node.target) == "native_dropout":  # its second result, the mask, must have no reader
        return all(u.target is operator.getitem and u.args[1] == 0 for u in node.users)
    return base_name(node.target) in ("dropout", "scaled_dot_product_attention")


def find_noise(graph: fx.Graph) -> list[str]:
    """Random operators other than dropout, whose numbers no plan can be made to share."""
    random = (n for n in graph.nodes if n.op == "call_function" and _is_random(n) and not _is_known(n))
    return [f"{base_name(n.target)}{in_source(n)} draws random numbers" for n in random]


def _replace(node: fx.Node, keys: fx.Node, site: int) -> None:
    if base_name(node.target) == "scaled_dot_product_attention":
        q, k, v, mask, p, *rest = node.args
        causal = rest[0] if rest else node.kwargs.get("is_causal", False)
        scale, enable_gqa = node.kwargs.get("scale"), node.kwargs.get("enable_gqa", False)
        node.args = (q, k, v, mask, causal, scale, enable_gqa, keys, p, site)
        node.target, node.kwargs = exact_attention, {}
        return
    if base_name(node.target) == "native_dropout":
        for user in list(node.users):
            user.replace_all_uses_with(node)
            node.graph.erase_node(user)
        node.meta["val"] = node.meta["val"][0]
    node.target, node.args, node.kwargs = exact_dropout, (operand(node, 0), keys, node.args[1], site), {}


def places(op: Op, axes: Axes, layout: Layout, mesh_dim: str = "tp", keys_whole: bool = False) -> tuple[Places, bool]:
    """(where the axes of what an operator draws for lie on the ranks, whether it has a part for each row).

    layout: what is sharded over the ranks of `mesh_dim`; keys_whole: apart from the last dim, an attention's keys.
    Refused where rows of the batch cannot be told apart in it.
    """
    assert op.drawn is not None
    found, num_rows = [], 0
    for at, dim in enumerate(op.drawn):
        sharded = frozenset() if keys_whole and at == len(op.drawn) - 1 else layout.sharded
        entries = [(a.size, mesh_dim if a in sharded else "") for a in leaves(dim)]
        for rows in _row_axes(axes):
            for i in range(len(entries) - len(rows) + 1):
                if rows and leaves(dim)[i : i + len(rows)] == rows and num_rows == 0:
                    size = 1
                    for row in rows:
                        size *= row.size
                    entries[i : i + len(rows)] = [(size, "batch")]
                    num_rows = size
        found.append(entries)
    rows = max(node.meta["val"].shape[0] for node in axes.ops if node.op == "placeholder")
    drawn_from = op.node.args[: 1 if op.attends is None else 2]  # of an attention, its queries and keys
    of_rows = any(not axes.ops[n].constant for n in drawn_from if isinstance(n, fx.Node))
    if of_rows != bool(num_rows) and rows > 1:
        problem = f"dropout{in_source(op.node)} of a value in which the rows of the batch cannot be told apart"
        raise Refused(Fault("dropout", "exact", problem, "use dropout=fast, or drop a value of shape [batch, ...]"))
    return found, of_rows


def find_draws(axes: Axes) -> list[tuple[Places, bool]]:
    """`places` of every dropout in whole values, in the order in which the model calls them."""
    whole = Layout(1, frozenset())
    return [places(op, axes, whole) for op in axes.ops.values() if op.drawn is not None]


def _row_axes(axes: Axes) -> list[Dim]:
    """Those of the fields, in an order that all ranks agree on."""
    fields = [op.out for node, op in axes.ops.items() if node.op == "placeholder"]
    return list(dict.fromkeys(leaves(dims[0]) for dims in fields if isinstance(dims, Dims) and len(dims)))
