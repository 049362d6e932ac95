"""What an operator does with the rows of a batch, from its rule about axes: the only one that a user writes.

A dim of rows that the rule neither needs whole nor sums over is computed part by part, so row by row.
"""

from __future__ import annotations

from torch import fx

from meg_compile.axes.atoms import Atom, Dim, Dims, atoms, leaves
from meg_compile.axes.infer import apply_rule
from meg_compile.axes.op import Op, dims_like, each, how_to_add, rule_for
from meg_compile.passes.rows.call import Call
from meg_compile.passes.rows.rules import total
from meg_compile.passes.rows.state import Const, Couples, Piece, Rows, State, Unclear, is_alike


def by_axes(call: Call) -> State | list[State]:
    """The state of an operator's result (a list for several). Unclear without a rule."""
    op, ops = Op(call.node), {node: _operand(node, call) for node in call.node.all_input_nodes}
    if rule_for(op) is None:
        raise Unclear(f"it has no rule; {how_to_add(op.name)}")
    apply_rule(op, ops)
    if not op.ruled:
        raise Unclear("its rule does not know this use of it")
    results = [_result(op, dims, ops, call) for dims in each(op.out)]
    return results if isinstance(call.val, (list, tuple)) else results[0]


def _operand(node: fx.Node, call: Call) -> Op:
    op = Op(node)
    op.out, op.constant = dims_like(op.val), isinstance(call.states[node], Const)
    return op


def _result(op: Op, out: Dims, ops: dict[fx.Node, Op], call: Call) -> State:
    needed, summed = _leaves(op.needed), _leaves(op.summed)
    found: set[tuple[Piece, ...]] = set()
    sums: set[tuple[Dim, ...]] = set()
    rows: set[Atom] = set()
    for node, operand in ops.items():
        state = call.state(node)
        if not isinstance(state, Rows):
            continue
        of_rows = [leaves(operand.out[piece.dim]) for piece in state.pieces]
        if not all(of_rows):
            raise Unclear("a batch of one row does not show where its rows lie")
        rows |= _leaves(of_rows)
        if needed & _leaves(of_rows):
            raise Couples("its rule needs the rows whole")
        gone = [_leaves([parts]) <= summed for parts in of_rows]
        if all(gone):
            sums.add(tuple(of_rows))
            continue
        places = [[i for i, dim in enumerate(out) if leaves(dim) == parts] for parts in of_rows]
        if any(gone) or any(len(at) != 1 for at in places):
            raise Couples("its rule does not give the rows back as one dim")
        found.add(tuple(sorted(p._replace(dim=at[0]) for p, at in zip(state.pieces, places, strict=True))))
    for node, operand in ops.items():
        state, shape = call.state(node), call.shape_of(node)
        met = [i for i, dim in enumerate(operand.out) if _leaves([dim]) & rows]
        if isinstance(state, Const) and not all(is_alike(state, i, shape) for i in met):
            raise Couples("it treats rows by their place in the batch")
    if len(found) + len(sums) != 1:
        raise Couples("it brings different rows together")
    return Rows(found.pop()) if found else total(call, "mean" if op.average else "sum")


def _leaves(dims: list[Dim]) -> set[Atom]:
    return {atom for dim in dims for atom in atoms(dim)}
