"""Sequence parallelism: which operators run on parts of the sequence (Korthikanti et al. 2022, arXiv:2205.05198).

Between g and f every tp rank would do the same work on the same values. There the sequence is sharded over the tp ranks
instead: g becomes a reduce-scatter, f an all-gather, and norms, dropout and residuals run on a part of the tokens. An
operator can, where it needs no position but its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from meg_compile.axes.atoms import Atom, Dims, atoms, leaves
from meg_compile.axes.infer import Axes
from meg_compile.axes.layout import Layout
from meg_compile.axes.op import Op, each
from meg_compile.errors import Fault, Refused
from meg_compile.graph.nodes import operand, source_line
from meg_compile.plan import Plan


@dataclass(frozen=True)
class Sequence:
    """The layout in which sequences are sharded too, and the operators that work in it."""

    layout: Layout
    axes: frozenset[Atom]
    nodes: frozenset[fx.Node]

    def at(self, dims: Dims) -> tuple[int, int] | None:
        """(dim, entries of its axes before the sequence) where a value's sequence lies in plain view, else None."""
        found = [(i, leaves(dim)) for i, dim in enumerate(dims) if any(a in self.axes for a in atoms(dim))]
        if len(found) != 1:
            return None
        i, parts = found[0]
        where = [j for j, atom in enumerate(parts) if atom in self.axes]
        if len(where) != 1:
            return None
        before = 1
        for atom in parts[: where[0]]:
            before *= atom.size
        return i, before


def shard_sequence(axes: Axes, layout: Layout, plan: Plan) -> Sequence:
    """Refused for a sequence that tp does not divide, or a model in which none is found."""
    if not plan.sp or plan.tp == 1:
        return Sequence(layout, frozenset(), frozenset())
    found = find_sequences(axes)
    uneven = sorted({a.size for a in found if a.size % plan.tp})
    if uneven or not found:
        problem = f"plan.tp={plan.tp} does not divide the sequence of {uneven[0]}" if uneven else why_not_found(axes)
        fix = f"use a data.seq_len that {plan.tp} divides, or plan.sp=false" if uneven else "use plan.sp=false"
        raise Refused(Fault("plan.sp", plan.sp, problem, fix))
    sequence = Sequence(Layout(layout.tp, layout.sharded | found), found, frozenset())
    nodes = frozenset(node for node, op in axes.ops.items() if _runs_on_parts(op, layout, sequence))
    return Sequence(sequence.layout, found, nodes)


def find_sequences(axes: Axes) -> frozenset[Atom]:
    """The axes of token positions. That of the rows is none, though a label of each row be looked up."""
    rows = {a for n, op in axes.ops.items() if n.op == "placeholder" for dim in op.out[:1] for a in atoms(dim)}
    found = (_positions(op, axes) for op in axes.ops.values())
    return frozenset(a for a in found if a is not None and a not in rows)


def why_not_found(axes: Axes) -> str:
    """Why no sequence was found: nothing looks tokens up, or what cuts or joins their positions, and where."""
    lookups = [op for op in axes.ops.values() if op.lookup is not None and not op.constant]
    lookups = [op for op in lookups if not axes.ops[operand(op.node, 1)].constant]
    if not lookups:
        return "no sequence was found: no operator looks up tokens of the batch in an embedding"
    positions = lookups[0].operands[1][-1]
    if not leaves(positions):
        return "no sequence was found: it has one position"
    for node, op in axes.ops.items():
        if node.op == "call_function" and _breaks(op, set(atoms(positions))):
            return f"no sequence was found: {op.name} at {source_line(node) or node.name} cuts or joins its positions"
    return "no sequence was found: its positions are cut or joined"


def _breaks(op: Op, positions: set[Atom]) -> bool:
    """Whether an operator takes a dim of positions and gives none that is the same."""
    before = {leaves(dim) for dims in op.operands for dim in dims if positions & set(atoms(dim))}
    after = {leaves(dim) for dims in each(op.out) for dim in dims}
    return op.name in _PIECES and bool(before - after)


_PIECES = set("cat stack slice narrow split split_with_sizes chunk tensor_split select unbind view reshape".split())
_PIECES |= set("flatten index index_select roll constant_pad_nd pad".split())


def _positions(op: Op, axes: Axes) -> Atom | None:
    """The axis of token positions: the last of the indices by which data looks up an embedding."""
    if op.lookup is None or op.constant or axes.ops[operand(op.node, 1)].constant:
        return None
    last = leaves(op.operands[1][-1])
    return last[0] if len(last) == 1 and last[0].segments is None and not last[0].torn else None


def _runs_on_parts(op: Op, layout: Layout, sequence: Sequence) -> bool:
    """Whether an operator needs no position but its own, and every result is a part of the sequence."""
    if op.node.op != "call_function" or not op.grad or layout.touches(op.shapes()):
        return False
    if any(a in sequence.axes for dim in [*op.needed, *op.summed] for a in atoms(dim)):
        return False
    held = [dims for dims in op.shapes() if any(a in sequence.axes for dim in dims for a in atoms(dim))]
    outs = list(each(op.out))
    return bool(outs) and all(out in held for out in outs) and all(sequence.at(dims) is not None for dims in held)
