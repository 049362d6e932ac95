"""Recognise attention masks that are constants: the causal one becomes is_causal=True, one that hides nothing goes.

In and out: a captured graph, in place. Many models build the mask of a causal decoder as a tensor; kernels such as
FlashAttention take none, and a mask of all positions cannot be cut where the sequence is.
"""

from __future__ import annotations

import torch
from torch import fx

from meg_compile.graph.capture import Captured
from meg_compile.graph.nodes import attention_mask, base_name
from meg_compile.passes.values import ValueOf, find_value


def fold_masks(captured: Captured, value_of: ValueOf) -> None:
    """value_of: the real value of a buffer or constant of the model; a tensor on meta where it has none."""
    known: dict[fx.Node, str] = {}
    for node in captured.graph.nodes:
        is_attention = node.op == "call_function" and base_name(node.target) == "scaled_dot_product_attention"
        mask = attention_mask(node) if is_attention else None
        if mask is None:
            continue
        if mask not in known:
            known[mask] = _kind(captured, mask, value_of)
        if known[mask] != "other":
            p = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
            node.args = (*node.args[:3], None, p, known[mask] == "causal")  # a mask and is_causal exclude each other
            node.kwargs = {key: v for key, v in node.kwargs.items() if key in ("scale", "enable_gqa")}
    captured.graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))


def _kind(captured: Captured, mask: fx.Node, value_of: ValueOf) -> str:
    """ "causal", "open" or "other"."""
    value = find_value(captured, mask, value_of)
    if value is None or value.dim() < 2:
        return "other"
    seen = value if value.dtype == torch.bool else value > torch.finfo(value.dtype).min
    if value.dtype != torch.bool and bool((value[seen] != 0).any()):
        return "other"
    if bool(seen.all()):
        return "open"
    rows, columns = seen.shape[-2:]
    causal = torch.ones(rows, columns, dtype=torch.bool).tril()
    return "causal" if rows == columns and torch.equal(seen, causal.expand(seen.shape)) else "other"
