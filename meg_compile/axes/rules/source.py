"""Values made from nothing."""

from __future__ import annotations

from typing import Any

from meg_compile.axes.atoms import Dims
from meg_compile.axes.op import Op, rule


@rule("arange", "linspace", "eye", "randperm")
def counted(op: Op, *args: Any, **kwargs: Any) -> Dims:
    """Entry i depends on i: on shards every rank takes its part of the whole."""
    op.source = True
    return op.fresh()


@rule(*"full zeros ones empty scalar_tensor new_zeros new_ones new_full new_empty".split())
def filled(op: Op, *args: Any, **kwargs: Any) -> Dims:
    """All entries are alike: on shards only the size changes."""
    out = op.fresh()
    op.operands = []
    at = 1 if op.name.startswith("new_") else 0
    if op.name != "scalar_tensor":
        op.localise = lambda size, *a, **k: (
            op.node.target,
            (*a[:at], [size(d) for d in out], *a[at + 1 :]),
            k,
        )
    return out
