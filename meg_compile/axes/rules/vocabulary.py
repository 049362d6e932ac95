"""The vocabulary axis: looked up by an embedding, classified over by a cross entropy."""

from __future__ import annotations

from meg_compile.axes.atoms import Dims, name, size_of
from meg_compile.axes.op import Op, rule
from meg_compile.axes.rules.elementwise import broadcast


@rule("embedding")
def embedding(op: Op, table: Dims, index: Dims, padding_idx: int = -1, *by_frequency: bool) -> Dims:
    if any(by_frequency):
        op.whole(table[0], "scales by frequency, or is sparse, over it")
    op.lookup = table[0]
    op.space = Dims(index + table)
    op.sum(table[0])
    name(table[1], "embed")
    return Dims(index + table[1:])


@rule("cross_entropy_loss")
def cross_entropy(
    op: Op,
    x: Dims,
    target: Dims,
    weight: Dims | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Dims:
    """Only the plain kind, logits [N, classes] and class indices [N], is computed on a sharded vocabulary."""
    c = min(1, len(x) - 1)
    if len(x) != 2 or len(target) != 1:
        op.whole(x[c], "is taken over other than [N, classes]")
    if weight is not None or label_smoothing:
        op.whole(x[c], "is weighted or smoothed over it")
    broadcast(x.put(c), target)
    if reduction:
        for dim in target:
            op.whole(dim, "sums over it")
    op.classes = x[c]
    name(x[c], "vocab")
    return Dims() if reduction else target


@rule("all_logits")
def all_logits(op: Op, x: Dims) -> Dims:
    """Whole on every rank, of a vocabulary that may be shared out."""
    op.classes = x[-1]
    name(x[-1], "vocab")
    return x.put(-1, op.new_whole(size_of(x[-1]), "gathers it"))
