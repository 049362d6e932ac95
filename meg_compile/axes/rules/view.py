"""Other shapes of the same entries: views, expansions, transpositions."""

from __future__ import annotations

from typing import Any

import torch

from meg_compile.axes.atoms import Dims, fresh, repeats, unify
from meg_compile.axes.op import Op, rule

aten = torch.ops.aten


@rule(*"view reshape _unsafe_view flatten unflatten squeeze unsqueeze view_as reshape_as ravel".split())
def view(op: Op, x: Dims, *args: Any, **kwargs: Any) -> Dims:
    """Both shapes laid end to end are the same axes: this is what finds heads x head_dim inside embed."""
    out = op.fresh()
    unify([a for d in x for a in d], [a for d in out for a in d])
    op.operands = [x]
    op.localise = lambda size, x, *_, **__: (aten.reshape.default, (x, [size(d) for d in out]), {})
    return out


@rule("expand", "broadcast_to")
def expand(op: Op, x: Dims, shape: list[int], **kwargs: Any) -> Dims:
    lead = len(op.val.shape) - len(x)
    out = Dims(x[i - lead] if i >= lead and x[i - lead] else repeats(n) for i, n in enumerate(op.val.shape))
    op.localise = lambda size, x, *_, **__: (aten.expand.default, (x, [size(d) for d in out]), {})
    return out


@rule("repeat")
def repeat(op: Op, x: Dims, times: list[int]) -> Dims:
    lead = len(times) - len(x)
    out = Dims(fresh(n) + (x[i - lead] if i >= lead else ()) for i, n in enumerate(times))
    for dim, n in zip(out, times, strict=True):
        if n > 1:
            op.whole(dim[:1], "repeats it")
    return out


@rule("repeat_interleave")
def repeat_interleave(op: Op, x: Dims, n: Any, dim: int | None = None, **kwargs: Any) -> Any:
    if dim is None or not isinstance(n, int):
        return op.unknown()
    copies = repeats(n)
    op.localise = lambda size, x, *_, **__: (aten.repeat_interleave.self_int, (x, size(copies), dim), {})
    return x.put(dim, x[dim] + copies)


@rule(*"transpose swapaxes t permute numpy_T mT adjoint".split())
def permute(op: Op, x: Dims, *dims: Any) -> Dims:
    order = list(range(len(x)))
    if op.name == "permute":
        order = [d % len(x) for d in dims[0]]
    elif op.name == "numpy_T":
        order.reverse()
    elif len(x) > 1:
        i, j = dims or (-2, -1)
        order[i], order[j] = order[j], order[i]
    return Dims(x[i] for i in order)


@rule("view_as_complex")
def view_as_complex(op: Op, x: Dims) -> Dims:
    op.whole(x[-1], "makes complex numbers of it")
    return Dims(x[:-1])


@rule("view_as_real")
def view_as_real(op: Op, x: Dims) -> Dims:
    return Dims((*x, op.new_whole(2, "makes it of complex numbers")))
