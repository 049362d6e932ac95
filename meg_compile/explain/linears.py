"""Which Linears run in parallel, in which role, and why the others do not."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import fx

from meg_compile.axes.atoms import Atom, Dims, atoms
from meg_compile.axes.op import Op
from meg_compile.explain.text import spell
from meg_compile.graph.nodes import locate, source_line

if TYPE_CHECKING:
    from meg_compile.program import Program


@dataclass(frozen=True)
class Linear:
    """One product of data with a weight, one convolution, or one embedding.

    flops: floating-point operations of its forward in the plain model.
    role:  "column" (produces a sharded axis), "row" (contracts one), "vocab" (its vocabulary is sharded) or "whole".
    axis:  the sharded axis, in words; for a whole one "".
    why:   for a whole one, the reason.
    atoms: the sharded axes of those that it has (`produced`, `contracted`).
    """

    module: str
    weight: str
    shape: tuple[int, ...]
    flops: int
    role: str
    axis: str
    why: str
    source: str
    atoms: frozenset[Atom]
    produced: frozenset[Atom]
    contracted: frozenset[Atom]


def find_linears(program: Program) -> list[Linear]:
    found = []
    for node, op in program.axes.ops.items():
        weight = _weight(node, op, program)
        if weight is not None:
            found.append(_describe(node, op, weight, program))
    return found


def _weight(node: fx.Node, op: Op, program: Program) -> fx.Node | None:
    """The weight of an operator that contracts data with one."""
    if node.op != "call_function" or op.constant or not _contracted(op) or len(op.operands) < 2:
        return None
    for candidate in node.all_input_nodes:
        known = program.axes.ops[candidate]
        if not (known.constant and known.grad and isinstance(known.out, Dims) and len(known.out) >= 2):
            continue
        if _contracted(op) & {a for dim in known.out for a in atoms(dim)}:
            return candidate
    return None


def _contracted(op: Op) -> set[Atom]:
    """What a product sums over; a convolution sums over what it needs whole."""
    gone = op.summed or (op.needed if op.work and op.attends is None else [])
    return {a for dim in gone for a in atoms(dim)}


def _describe(node: fx.Node, op: Op, weight: fx.Node, program: Program) -> Linear:
    layout = program.choice.layout
    dims = program.axes.ops[weight].out
    summed = _contracted(op)
    of_weight = {a for dim in dims for a in atoms(dim)}
    produced = of_weight - summed
    sharded = (summed | produced) & layout.sharded
    if op.lookup is not None or (op.classes is not None):
        role = "vocab" if sharded & summed else "column"
    else:
        role = "row" if sharded & summed else "column"
    if role == "column" and any("vocab" in a.names for a in sharded):
        role = "vocab"
    why = "" if sharded else _why_whole(produced, summed & of_weight, program, lookup=op.lookup is not None)
    axis = next((spell(d, layout) for d in dims if layout.holds(d)), "")
    return Linear(
        locate(node),
        _root(weight),
        tuple(weight.meta["val"].shape),
        op.flops,
        role if sharded else "whole",
        axis,
        why,
        source_line(node),
        frozenset(sharded),
        frozenset(produced),
        frozenset(summed),
    )


def _root(node: fx.Node) -> str:
    while node.op != "get_attr":
        node = next(n for n in node.all_input_nodes)
    return str(node.target)


def _why_whole(produced: set[Atom], summed: set[Atom], program: Program, lookup: bool) -> str:
    if program.plan.tp == 1:
        return "tp=1"
    refused = program.choice.refused
    out = _reasons(produced, refused) or "no later Linear contracts it"
    if lookup:
        return f"{_reasons(summed, refused) or 'its rows are not looked up by data'}; its output: {out}"
    into = _reasons(summed, refused) or "no Linear produces it"
    return f"output: {out}; input: {into}"


def _reasons(axes: set[Atom], refused: dict[Atom, str]) -> str:
    """Why some axes are whole, those with the same reason together; "" where nothing is known of any."""
    by_reason: dict[str, set[str]] = defaultdict(set)
    for atom in axes:
        if reason := atom.whole or refused.get(atom):
            by_reason[reason].add("/".join(sorted(atom.names)) or str(atom.size))
    return "; ".join(sorted(f"{', '.join(sorted(names))}: {reason}" for reason, names in by_reason.items()))
