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


def retarget(graph: fx.Graph, device: torch.device) -> None:
    """Point every device literal (torch.arange(..., device=ids.device) bakes one in) at a device."""
    for node in graph.nodes:
        if isinstance(node.kwargs.get("device"), torch.device):
            node.kwargs = {**node.kwargs, "device": device}
