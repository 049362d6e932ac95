"""What the loss of a micro-batch is to the loss of a whole batch: a walk over the captured graph.

A loss may be cut into micro-batches where no row of the batch sees another before the rows are added up, and what
becomes of the sums is linear. Whether a sum is divided by the number of rows, which a graph holds as a plain number, is
seen by capturing once more with twice as many rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from meg_compile.graph.capture import Captured
from meg_compile.graph.nodes import base_name, source_line
from meg_compile.passes.rows import rules, shapes  # noqa: F401  (registers the rules)
from meg_compile.passes.rows.by_axes import by_axes
from meg_compile.passes.rows.call import Call, rule_for
from meg_compile.passes.rows.constants import COPIES, constant, number
from meg_compile.passes.rows.rules import entry_by_entry
from meg_compile.passes.rows.sort import of_sorted
from meg_compile.passes.rows.state import Const, Couples, Part, Piece, Rows, Sorted, Total, Unclear
from meg_compile.passes.values import ValueOf, find_value

SCALINGS = ("mul", "div", "true_divide", "floor_divide")


@dataclass(frozen=True)
class Verdict:
    """parts: what the loss adds up, each a "sum", a "mean" or "counted". const: whether it adds something else too.
    coupled: why the loss of a batch is not made of those of its rows; unclear: why that is not known. Or "".
    """

    parts: tuple[Part, ...] = ()
    const: bool = False
    coupled: str = ""
    unclear: str = ""


@dataclass
class _Lost:
    """A value whose rows are not apart, or that is not understood."""

    verdict: Verdict


@dataclass
class _Walk:
    num_rows: int
    value_of: Callable[[fx.Node], torch.Tensor | None]
    states: dict[fx.Node, Any] = field(default_factory=dict)
    loss: Any = None
    suspect: bool = False


def judge(captured: Captured, again: Callable[[int], Captured], value_of: ValueOf = lambda tensor: tensor) -> Verdict:
    """again(n): captures the same with n times the rows. value_of: the real value of a buffer or constant."""
    walk = _walk(captured, value_of)
    if isinstance(walk.loss, _Lost) and walk.num_rows == 1:  # which of several dims of size 1 are rows is a guess
        return _of_two_rows(captured, again, value_of, walk.loss.verdict)
    if isinstance(walk.loss, _Lost):
        return walk.loss.verdict
    if not isinstance(walk.loss, Total):
        return Verdict(const=True)
    verdict = Verdict(tuple(sorted(walk.loss.parts, key=lambda p: p.node.name)), walk.loss.const)
    if not walk.suspect and all(part.kind != "sum" for part in verdict.parts):
        return verdict
    try:
        twice = again(2)
    except Exception as error:
        return Verdict(unclear=f"the model cannot be captured with twice the rows ({type(error).__name__})")
    return _compared(captured, twice, value_of, walk, verdict)


def _of_two_rows(
    captured: Captured, again: Callable[[int], Captured], value_of: ValueOf, otherwise: Verdict
) -> Verdict:
    """The verdict on the same graph for two rows, which shows where they lie."""
    try:
        twice = again(2)
    except Exception:
        return otherwise
    verdict = judge(twice, lambda times: again(2 * times), value_of)
    nodes, others = _without_copies(captured), _without_copies(twice)
    if [n.target for n in nodes] != [n.target for n in others]:
        return verdict if verdict.coupled else Verdict(unclear="the model computes otherwise with two rows")
    twin = dict(zip(others, nodes, strict=True))
    return replace(verdict, parts=tuple(part._replace(node=twin[part.node]) for part in verdict.parts))


def _without_copies(captured: Captured) -> list[fx.Node]:
    """What computes: one row may be a view of what two rows are a copy of."""
    return [node for node in captured.graph.nodes if base_name(node.target) not in COPIES]


def _walk(captured: Captured, value_of: ValueOf) -> _Walk:
    nodes = captured.graph.nodes
    num_rows = next((int(n.meta["val"].shape[0]) for n in nodes if n.op == "placeholder"), 1)
    walk = _Walk(num_rows, lambda node: find_value(captured, node, value_of))
    for node in nodes:
        if node.op == "placeholder":
            walk.states[node] = Rows((Piece(0, 1, 1, num_rows),))
        elif node.op == "get_attr":
            walk.states[node] = Const()
        elif node.op == "output":
            walk.loss = walk.states[node.args[0]]
        else:
            walk.states[node] = _state(node, walk, num_rows)
    if isinstance(walk.loss, Rows):
        walk.loss = _Lost(Verdict(coupled="the loss is one number for each row"))
    return walk


def _state(node: fx.Node, walk: _Walk, num_rows: int) -> Any:
    states = [walk.states[n] for n in node.all_input_nodes]
    lost = [s for s in states if isinstance(s, _Lost)]
    if lost:
        return next((s for s in lost if s.verdict.coupled), lost[0])
    if base_name(node.target) == "getitem":
        at: Any = node.args[1]
        return states[0][at] if isinstance(states[0], list) else states[0]
    call = Call(node, walk.states, walk.value_of)
    try:
        if any(isinstance(s, Sorted) for s in states):
            return of_sorted(call)
        if all(isinstance(s, Const) for s in states):
            return constant(call, num_rows)
        if any(isinstance(s, Total) for s in states):
            tensor = any(isinstance(s, Const) for s in states)
            walk.suspect |= call.name in SCALINGS and (tensor or any(_may_count(a, num_rows) for a in node.args))
            return number(call)
        walk.suspect |= call.name in SCALINGS and any(isinstance(a, int) and a % num_rows == 0 for a in node.args)
        return _of_rows(call)
    except Couples as how:
        return _Lost(Verdict(coupled=f"{_place(node)}: {how}"))
    except Unclear as why:
        return _Lost(Verdict(unclear=f"{_place(node)}: {why}"))


def _of_rows(call: Call) -> Any:
    if torch.Tag.pointwise in getattr(call.node.target, "tags", ()):
        return entry_by_entry(call)
    rule = rule_for(call.name) or by_axes
    return rule(call)


def _may_count(number: Any, num_rows: int) -> bool:
    """Whether a number may be made of the number of rows: a multiple, or one over a multiple."""
    if not isinstance(number, (int, float)) or not number:
        return False
    return any(
        round(n) >= num_rows and abs(n / num_rows - round(n / num_rows)) < 1e-6 for n in (abs(number), 1 / abs(number))
    )


def _place(node: fx.Node) -> str:
    return " at ".join(filter(None, (base_name(node.target), source_line(node))))


def _compared(captured: Captured, twice: Captured, value_of: ValueOf, walk: _Walk, verdict: Verdict) -> Verdict:
    """What the parts are with regard to the number of rows, from the same graph for twice as many."""
    nodes, others = list(captured.graph.nodes), list(twice.graph.nodes)
    if [n.target for n in nodes] != [n.target for n in others]:
        return Verdict(unclear="the model computes otherwise with twice the rows")
    for node, other in zip(nodes, others, strict=True):
        scales = base_name(node.target) in SCALINGS and isinstance(walk.states.get(node), Total)
        if not scales and not _same_numbers(node, other, captured, twice):
            return Verdict(coupled=f"{_place(node)}: it computes with the number of rows")
    again = _walk(twice, value_of).loss
    twin = dict(zip(nodes, others, strict=True))
    if not isinstance(again, Total):
        return again.verdict if isinstance(again, _Lost) else Verdict(unclear="the loss is another with twice the rows")
    parts = []
    for part in verdict.parts:
        scales = [p.scale for p in again.parts if p.node is twin[part.node]]
        if len(scales) != 1 or sum(p.node is part.node for p in verdict.parts) > 1:
            if part.scale not in scales:
                return Verdict(coupled=f"{_place(part.node)}: it is multiplied by the number of rows")
            scales = [part.scale]
        ratio = round(scales[0] / part.scale, 6) if part.scale else 1.0
        kind = {("sum", 1.0): "sum", ("sum", 0.5): "mean", ("mean", 2.0): "sum"}.get((part.kind, ratio))
        if kind is None and ratio != 1.0:
            return Verdict(coupled=f"{_place(part.node)}: it is multiplied by the number of rows")
        parts.append(part._replace(kind=kind or part.kind))
    return Verdict(tuple(parts), verdict.const)


def _same_numbers(node: fx.Node, other: fx.Node, captured: Captured, twice: Captured) -> bool:
    """Whether what an operator computes with is the same for twice the rows, the shapes that it gives aside."""
    if node.op == "get_attr":
        one, two = captured.tensors[str(node.target)], twice.tensors[str(other.target)]
        if one.numel() != 1 or one.is_meta or two.is_meta or one.requires_grad:
            return True
        return bool((one == two).all())
    if torch.Tag.pointwise in getattr(node.target, "tags", ()) or base_name(node.target) in SCALINGS:
        return list(_numbers(node.args)) == list(_numbers(other.args))
    if base_name(node.target) in ("full", "new_full", "full_like", "scalar_tensor", "fill"):
        return list(_numbers(node.args[-1:])) == list(_numbers(other.args[-1:]))
    return True


def _numbers(args: Any) -> Iterator[float]:
    found: list[float] = []
    for arg in args:
        if isinstance(arg, (list, tuple)):
            found += _numbers(arg)
        elif isinstance(arg, (int, float)):
            found.append(float(arg))
    yield from found
