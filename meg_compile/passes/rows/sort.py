"""What operators do with rows that a sort has put in another order, and how they get back (mixtures of experts)."""

from __future__ import annotations

from typing import Any

import torch

from meg_compile.graph.nodes import base_name, operand
from meg_compile.passes.rows.call import Call
from meg_compile.passes.rows.state import Const, Couples, Rows, Sorted

_COPIES = set("to _to_copy contiguous clone detach alias type_as float double".split())
_LIKE = set("empty_like zeros_like ones_like full_like".split())
_GROUPED = ("grouped_mm", "_grouped_mm", "transformers::grouped_mm_fallback")


def of_sorted(call: Call) -> Any:
    """The state of the result of an operator that reads a `Sorted`. Couples where it may bring rows together."""
    states = [call.state(n) for n in call.node.all_input_nodes]
    found = [s for s in states if isinstance(s, Sorted)]
    first, kinds = found[0], {s.kind for s in found}
    if call.name in _LIKE:
        return Const()
    if len({s.by for s in found}) == 1:
        if call.name == "index":
            state = _picked(call)
        elif call.name == "index_put":
            state = _back(call)
        elif call.name in _GROUPED:
            state = _grouped(call)
        elif (call.name == "histc" and kinds == {"keys"}) or (call.name == "cumsum" and kinds == {"counts"}):
            state = Sorted(first.by, first.rows, "counts")
        elif call.name in _COPIES and len(states) == 1:
            state = first
        elif call.name == "floor_divide" and kinds == {"order"} and isinstance(call["other"], int):
            state = Sorted(first.by, first.rows, "order", first.every * call["other"])
        elif kinds <= {"keys", "values"} and _by_itself(call):
            state = Sorted(first.by, first.rows, "values")
        else:
            state = None
        if state is not None:
            return [state] * len(call.val) if isinstance(call.val, (list, tuple)) else state
    raise Couples("it works across rows that were sorted")


def _by_itself(call: Call) -> bool:
    """Whether each entry of dim 0 of the result depends on the same of all operands."""
    if call.name in ("split", "split_with_sizes", "chunk", "slice", "unsqueeze", "select"):
        ndim = len(call.shape_of(call.node.all_input_nodes[0])) + (call.name == "unsqueeze")
        return call["dim"] is not None and call["dim"] % ndim > 0
    if call.name == "linear":
        return isinstance(call.state(call["weight"]), Const) and len(call.shape) > 1
    if torch.Tag.pointwise not in getattr(call.node.target, "tags", ()):
        return False
    for node in call.node.all_input_nodes:
        lead = len(call.shape) - len(call.shape_of(node))
        if isinstance(call.state(node), Const):
            if not call.is_alike(node, -lead):
                return False
        elif lead or not isinstance(call.state(node), Sorted):
            return False
    return True


def _picked(call: Call) -> Rows | Sorted | None:
    """x[order]: of every entry what its own row has; x[keys] of a constant; values[back]: rows as they were."""
    x, (index, *others) = call.state(call["self"]), call["indices"]
    if index is None or any(i is not None for i in others):
        return None
    at = call.state(index)
    if not isinstance(at, Sorted):
        return None
    values = Sorted(at.by, at.rows, "values")
    if isinstance(x, Sorted):
        return at.rows if at.kind == "back" and x.kind in ("keys", "values") else None
    if isinstance(x, Const):
        return values if at.kind == "keys" else None
    length, sorted_length = call.shape_of(call["self"])[0], call.shape_of(index)[0]
    leading = isinstance(x, Rows) and _is_leading(x, length) and _is_leading(at.rows, sorted_length)
    return values if at.kind == "order" and leading and length * at.every == sorted_length else None


def _is_leading(rows: Rows, length: int) -> bool:
    """Whether dim 0 is nothing but the rows, one after the other."""
    piece = rows.pieces[0]
    return len(rows.pieces) == 1 and (piece.dim, piece.stride, piece.inner * piece.size) == (0, 1, length)


def _back(call: Call) -> Sorted | None:
    """back[order] = arange(n)"""
    (index, *others), values = call["indices"], call["values"]
    at = call.state(index)
    counts = base_name(values.target) == "arange" and call.shape_of(values) == call.shape_of(index)
    if not others and counts and isinstance(at, Sorted) and (at.kind, at.every) == ("order", 1):
        value = call.value_of(values)
        if value is not None and torch.equal(value, torch.arange(len(value))) and not call["accumulate"]:
            return Sorted(at.by, at.rows, "back")
    return None


def _grouped(call: Call) -> Sorted | None:
    """Each entry times the matrix of its own key: the groups end where the keys change."""
    x, weights, ends = (call.state(operand(call.node, i)) for i in range(3))
    if not (isinstance(x, Sorted) and isinstance(weights, Const) and isinstance(ends, Sorted)):
        return None
    return Sorted(x.by, x.rows, "values") if (x.kind, ends.kind) == ("values", "counts") else None
