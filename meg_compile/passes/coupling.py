"""Does a loss couple the rows of a batch? Then micro-batches and replicas do not add up to the global batch.

Rows are coupled where the batch meets itself in one value (a contrastive loss compares all rows with all), or where a
mean or a sum over it goes on into the model (batch statistics).
"""

from __future__ import annotations

from meg_compile.axes.atoms import Atom, atoms
from meg_compile.axes.infer import Axes
from meg_compile.axes.op import Op
from meg_compile.graph.nodes import source_line


def find_coupling(axes: Axes) -> str | None:
    """Where rows are coupled, as a source line or an operator's name; None where every row stands alone.

    In a micro-batch of one row nothing can be seen.
    """
    batch = {a for op in axes.ops.values() if op.node.op == "placeholder" and op.out for a in atoms(op.out[0])}
    for node, op in axes.ops.items():
        if node.op == "call_function" and not op.constant and _couples(op, batch):
            return source_line(node) or node.name
    return None


def _couples(op: Op, batch: set[Atom]) -> bool:
    for dims in op.shapes():
        if dims is not op.space and sum(a in batch for dim in dims for a in atoms(dim)) > 1:
            return True
    kept = getattr(op.val, "dim", lambda: 0)() > 0 and op.val.numel() > 1
    return kept and op.lookup is None and any(a in batch for dim in op.summed for a in atoms(dim))
