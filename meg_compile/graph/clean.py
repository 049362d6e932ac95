"""What capture leaves in a graph that computes nothing."""

from __future__ import annotations

import torch
from torch import fx

aten = torch.ops.aten

_ASSERTS = {
    "_assert_tensor_metadata",
    "_assert_async",
    "_assert_scalar",
    "sym_constrain_range",
    "sym_constrain_range_for_size",
}


def clean(graph: fx.Graph) -> None:
    """Remove shape assertions, dropout that drops nothing, what joins nothing, and values that nobody reads.

    A view becomes a reshape: whether one suffices depends on strides, which other kernels leave otherwise.
    """
    for node in reversed(list(graph.nodes)):
        name = getattr(node.target, "_opname", getattr(node.target, "__name__", ""))
        if node.op != "call_function":
            continue
        if node.target in (aten.view.default, aten._unsafe_view.default):
            node.target = aten.reshape.default
        elif node.target is aten.copy.default:
            _replace_copy(graph, node)
        elif name in _ASSERTS or name == "_guards_fn":
            graph.erase_node(node)
        elif name == "dropout" and (node.args[1] == 0 or not node.args[2]):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif name == "cat":
            _without_empty(node)
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))


def _without_empty(cat: fx.Node) -> None:
    """A cache of keys and values starts as a tensor without entries, of one dim, that the first ones are joined to."""
    joined = [n for n in cat.args[0] if n.meta["val"].numel()]  # type: ignore[union-attr]
    if not joined or any(n.meta["val"].dtype != cat.meta["val"].dtype for n in joined):
        return
    cat.args = (joined, *cat.args[1:])
    if len(joined) == 1:
        cat.replace_all_uses_with(joined[0])


def _replace_copy(graph: fx.Graph, node: fx.Node) -> None:
    """What is left of x.copy_(y) is y in x's shape and dtype; copy itself has no derivative."""
    over, value = node.args[:2]
    assert isinstance(over, fx.Node) and isinstance(value, fx.Node)
    wanted, given = over.meta["val"], value.meta["val"]
    with graph.inserting_before(node):
        if wanted.dtype != given.dtype:
            value = graph.call_function(aten.to.dtype, (value, wanted.dtype))
            value.meta = node.meta | {"val": given.to(wanted.dtype)}
        if wanted.shape != given.shape:
            value = graph.call_function(aten.expand.default, (value, list(wanted.shape)))
            value.meta = dict(node.meta)
    node.replace_all_uses_with(value)
    graph.erase_node(node)


def retarget(graph: fx.Graph, device: torch.device) -> None:
    """Point every device literal (torch.arange(..., device=ids.device) bakes one in) at a device."""
    for node in graph.nodes:
        node.args = tuple(device if isinstance(a, torch.device) else a for a in node.args)
        if isinstance(node.kwargs.get("device"), torch.device):
            node.kwargs = {**node.kwargs, "device": device}
