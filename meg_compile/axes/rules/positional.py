"""Operators that need an axis whole: softmax, norms, scans, triangles, convolutions."""

from __future__ import annotations

from typing import Any

from meg_compile.axes.atoms import Dims, unify
from meg_compile.axes.op import Op, each, rule
from meg_compile.axes.rules.elementwise import broadcast


@rule(*"softmax _softmax log_softmax _log_softmax cumsum cumprod".split())
def along(op: Op, x: Dims, *args: Any, **kwargs: Any) -> Any:
    dim = next((a for a in args if isinstance(a, int)), kwargs.get("dim"))
    if not isinstance(dim, int):
        return op.unknown()
    op.whole(x[dim], "runs along it")
    return x


@rule("tril", "triu")
def triangle(op: Op, x: Dims, diagonal: int = 0) -> Dims:
    op.whole(x[-1] + x[-2], "keeps a triangle of it")
    return x


@rule("layer_norm", "rms_norm")
def norm(op: Op, x: Dims, shape: list[int], *affine: Any, **kwargs: Any) -> Dims:
    for dim in x[-len(shape) :]:
        op.whole(dim, "normalises over it")
    return broadcast(x, *each(affine, kwargs))


@rule("conv1d", "conv2d", "conv3d")
def convolution(op: Op, x: Dims, weight: Dims, bias: Dims | None = None, *args: Any, **kwargs: Any) -> Dims:
    for dim in x[1:] + weight[1:]:
        op.whole(dim, "convolves over it")
    if bias is not None:
        unify(weight[0], bias[0])
    out = Dims((x[0], weight[0], *(op.new_whole(n, "makes it") for n in op.val.shape[2:])))
    op.space, op.work = Dims(out + weight[1:]), 2
    return out
