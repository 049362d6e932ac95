"""Values that have nothing of the batch, and numbers that are sums over all of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from meg_compile.passes.rows.call import Call, tensors
from meg_compile.passes.rows.rules import total
from meg_compile.passes.rows.shapes import PERMUTES, VIEWS, order_of, reshaped_by
from meg_compile.passes.rows.state import Const, Couples, Piece, Total, Unclear, all_alike, is_alike

ALIKE = set("full zeros ones empty scalar_tensor new_zeros new_ones new_full new_empty rand randn randint".split())
ALIKE |= set("zeros_like ones_like full_like empty_like rand_like randn_like bernoulli normal".split())
COPIES = set("to _to_copy contiguous clone detach alias lift_fresh lift_fresh_copy type_as float double".split())
LINEAR = VIEWS | PERMUTES | COPIES
LINEAR |= set("expand expand_as repeat select slice narrow split split_with_sizes chunk unbind sum mean neg".split())
PRODUCTS = set("linear mm bmm mv dot matmul".split())


def constant(call: Call, num_rows: int) -> Any:
    """What is known of a value that is made of constants."""
    if isinstance(call.val, (list, tuple)):
        return [Const() for _ in call.val]
    shape = call.shape
    if call.name in ALIKE:
        return all_alike(shape)
    nodes = tensors(list(call.arguments.values()))
    nodes += [n for n in call.node.all_input_nodes if n not in nodes]
    found = frozenset(d for d in range(len(shape)) if shape[d] == 1)
    if call.name == "arange":
        counts = shape == [num_rows] and (call["start"] or 0) == 0 and call["step"] in (None, 1)
        return Const(found, (Piece(0, 1, 1, num_rows),) if counts else ())
    if call.name in VIEWS:
        return _view(call, nodes[0], found)
    if call.name == "embedding" or (call.name == "index" and len(call["indices"]) == 1):
        return _looked_up(call, *nodes)
    state, before = _const(call, nodes[0]) if nodes else (Const(), shape)
    if call.name in PERMUTES:
        order = order_of(call, len(before))
        numbers = tuple(p._replace(dim=order.index(p.dim)) for p in state.numbers)
        return Const(frozenset(i for i, d in enumerate(order) if is_alike(state, d, before)), numbers)
    if call.name == "expand":
        lead = len(shape) - len(before)
        alike = frozenset(d for d in range(len(shape)) if is_alike(state, d - lead, before))
        return Const(alike, tuple(p._replace(dim=p.dim + lead) for p in state.numbers))
    if call.name in COPIES and len(nodes) == 1:
        return state
    if call.name in ("slice", "narrow"):
        return Const(frozenset(d for d in range(len(shape)) if is_alike(state, d, before)))
    if torch.Tag.pointwise in getattr(call.node.target, "tags", ()) or call.name in ("where", "masked_fill", "dropout"):
        known = [(*_const(call, n), len(shape) - len(call.shape_of(n))) for n in nodes]
        return Const(frozenset(d for d in range(len(shape)) if all(is_alike(c, d - lead, s) for c, s, lead in known)))
    return Const(found)


def _looked_up(call: Call, table: fx.Node, index: fx.Node) -> Const:
    """table[index]: alike where the index is."""
    state, before = _const(call, table)
    lead = len(call.shape_of(index))
    alike = [d for d in range(lead) if call.is_alike(index, d)]
    return Const(frozenset(alike + [d for d in range(lead, len(call.shape)) if is_alike(state, d - lead + 1, before)]))


def _const(call: Call, node: fx.Node) -> tuple[Const, list[int]]:
    state = call.state(node)
    assert isinstance(state, Const)
    return state, call.shape_of(node)


def _view(call: Call, node: fx.Node, single: frozenset[int]) -> Const:
    state, before = _const(call, node)
    after = call.shape
    if all(is_alike(state, d, before) for d in range(len(before))):
        return all_alike(after)
    numbers = reshaped_by(call, state.numbers, before) or ()

    def steps(shape: list[int]) -> dict[tuple[int, int], int]:
        return {(torch.Size(shape[d + 1 :]).numel(), shape[d]): d for d in range(len(shape)) if shape[d] > 1}

    same = steps(before)
    kept = {d for key, d in steps(after).items() if key in same and is_alike(state, same[key], before)}
    return Const(single | kept, numbers)


def number(call: Call) -> Any:
    """A linear combination of sums over the rows, and constants."""
    nodes = call.node.all_input_nodes
    totals = [s for n in nodes if isinstance(s := call.state(n), Total)]
    if len(totals) < len(nodes) and not all(isinstance(call.state(n), (Total, Const)) for n in nodes):
        raise Couples("it brings a number of the whole batch back to its rows")
    merged = Total(frozenset().union(*(t.parts for t in totals)), any(t.const for t in totals))
    if call.name in ("clamp", "clamp_min") and count_of(call, call.node) is not None:
        return total(call, "at least 1")
    if any(part.kind == "at least 1" for part in merged.parts) and call.name not in ("div", "true_divide"):
        raise Couples("it bounds a sum over the batch")
    if call.name in LINEAR:
        return [merged] * len(call.val) if isinstance(call.val, (list, tuple)) else merged
    if call.name in ("cat", "stack"):
        return Total(merged.parts, merged.const or len(totals) < len(call["tensors"]))
    if call.name in ("add", "sub", "rsub"):
        return _added(call, merged)
    if call.name in ("mul", "div", "true_divide"):
        return _scaled(call, merged, totals)
    if call.name in PRODUCTS and len(totals) == 1:
        return Total(merged.parts, merged.const or call["bias"] is not None)
    if torch.Tag.pointwise in getattr(call.node.target, "tags", ()) or len(totals) > 1:
        raise Couples("it is no linear function of a sum over the batch")
    raise Unclear("what it makes of a sum over the batch is not known")


def _added(call: Call, merged: Total) -> Total:
    """Of two terms; the number that the second is multiplied by belongs to it."""
    first, second = call["self"], call["other"]
    alpha = 1 if call["alpha"] is None else call["alpha"]
    one, other = (
        s if isinstance(n, fx.Node) and isinstance(s := call.state(n), Total) else None for n in (first, second)
    )
    if call.name == "rsub":
        one, other = other, one
    parts = (one.parts if one else frozenset()) | (other.scaled(alpha).parts if other else frozenset())
    const = merged.const or (one is None and first != 0) or (other is None and second != 0)
    return Total(parts, const)


def _scaled(call: Call, merged: Total, totals: list[Total]) -> Total:
    first, second = call["self"], call["other"]
    divides = call.name != "mul"
    if len(totals) == 2 or first is second:
        if divides and count_of(call, second) is not None:
            numerator = call.state(first)
            assert isinstance(numerator, Total)
            if not numerator.const and all(part.kind == "sum" for part in numerator.parts):
                return total(call, "counted")
        raise Couples("it multiplies or divides sums over the batch")
    if divides and isinstance(second, fx.Node) and isinstance(call.state(second), Total):
        raise Couples("it divides by a sum over the batch")
    literal = second if not isinstance(second, fx.Node) else first if not isinstance(first, fx.Node) else 1.0
    return merged.scaled(1 / literal if divides and literal else literal) if literal else merged


def count_of(call: Call, node: fx.Node) -> fx.Node | None:
    """The plain sum over the batch that a divisor is, below a .clamp(min=1); None where it is something else."""
    node = unclamped(node)
    state = call.state(node)
    plain = isinstance(state, Total) and not state.const and all(p[1:] == ("sum", 1.0) for p in state.parts)
    return node if plain else None


def unclamped(node: fx.Node) -> fx.Node:
    """What is below a .clamp(min=1), which changes no count but 0."""
    if node.target in (torch.ops.aten.clamp.default, torch.ops.aten.clamp_min.default) and len(node.args) == 2:
        below, least = node.args
        if isinstance(least, (int, float)) and least <= 1 and isinstance(below, fx.Node):
            return below
    return node
