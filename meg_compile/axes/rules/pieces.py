"""Cutting an axis into pieces and joining pieces into an axis."""

from __future__ import annotations

from typing import Any

import torch

from meg_compile.axes.atoms import Dims, concatenate, fresh, size_of, unify
from meg_compile.axes.op import Op, rule
from meg_compile.axes.rules.elementwise import broadcast

aten = torch.ops.aten
_TO_END = 2**62


@rule(*"split split_with_sizes chunk tensor_split unsafe_split unsafe_chunk".split())
def split(op: Op, x: Dims, how: Any, dim: int = 0) -> list[Dims]:
    pieces = op.cut(x[dim], [int(v.shape[dim]) for v in op.val])
    op.localise = lambda size, x, *_: (aten.split_with_sizes.default, (x, [size(p) for p in pieces], dim), {})
    return [x.put(dim, piece) for piece in pieces]


@rule("glu")
def glu(op: Op, x: Dims, dim: int = -1) -> Dims:
    left, right = op.cut(x[dim], [size_of(x[dim]) // 2] * 2)
    unify(left, right)
    return x.put(dim, left)


@rule("context_part", "newest_part")
def part_of_sequence(op: Op, x: Dims, which: None, places: list[list[tuple[int, bool]]], *_: int) -> Dims:
    sizes = op.val.shape
    return Dims(dim if size_of(dim) == n else op.new_whole(n, "cuts it") for dim, n in zip(x, sizes, strict=True))


@rule("unbind")
def unbind(op: Op, x: Dims, dim: int = 0) -> list[Dims]:
    op.whole(x[dim], "takes it apart")
    return [x.put(dim)] * len(op.val)


@rule("select")
def select(op: Op, x: Dims, dim: int, index: int) -> Dims:
    op.whole(x[dim], "picks one entry of it")
    return x.put(dim)


@rule("narrow")
def narrow(op: Op, x: Dims, dim: int, start: int, length: int) -> Dims:
    start %= size_of(x[dim]) or 1
    return slice_(op, x, dim, start, start + length)


@rule("slice")
def slice_(op: Op, x: Dims, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Dims:
    n = size_of(x[dim])
    start, end, step = slice(start, end, step).indices(n)
    if step != 1 and n % step == 0 and start < step and end > n - step + start:
        major, minor = fresh(n // step), fresh(step)
        unify(x[dim], major + minor)
        op.whole(minor, "keeps one of every few")
        first, every = start, step
        op.localise = lambda size, x, *_: (aten.slice.Tensor, (x, dim, first, _TO_END, every), {})
        return x.put(dim, major)
    if step != 1 or end <= start:
        op.whole(x[dim], "keeps some of it")
        return x.put(dim, op.new_whole(int(op.val.shape[dim]), "makes it"))
    pieces = op.cut(x[dim], [s for s in (start, end - start, n - end) if s])
    before, kept = (pieces[0], pieces[1]) if start else (None, pieces[0])

    def localise(size, x, *_):
        first = size(before) if before is not None else 0
        return aten.slice.Tensor, (x, dim, first, first + size(kept)), {}

    op.localise = localise
    return x.put(dim, kept)


@rule("cat", "concat")
def cat(op: Op, xs: list[Dims], dim: int = 0) -> Dims:
    others = broadcast(*(x.put(dim, ()) for x in xs))
    return others.put(dim, concatenate([x[dim] for x in xs]))


@rule("stack")
def stack(op: Op, xs: list[Dims], dim: int = 0) -> Dims:
    out = list(broadcast(*xs))
    out.insert(dim % (len(out) + 1), op.new_whole(len(xs), "makes it by stacking"))
    return Dims(out)


@rule("gather", "index_select")
def gather(op: Op, x: Dims, dim: int, index: Dims, **kwargs: Any) -> Dims:
    op.whole(x[dim], "picks entries of it")
    if op.name == "index_select":
        return x.put(dim, index[0])
    for i, (ours, theirs) in enumerate(zip(x, index, strict=True)):
        if i == dim % len(x):
            continue
        if size_of(ours) == size_of(theirs):
            unify(ours, theirs)
        else:
            op.whole(ours + theirs, "picks entries of it")
    return index


@rule("index")
def index(op: Op, x: Dims, at: list[Dims | None]) -> Any:
    where = [i for i, a in enumerate(at) if a is not None]
    picked = broadcast(*(a for a in at if a is not None))
    for i in where:
        op.whole(x[i], "picks entries of it")
    rest = [d for i, d in enumerate(x) if i not in where]
    if len(picked) != op.val.dim() - len(rest):
        return op.unknown()
    start = where[0] if where == list(range(where[0], where[-1] + 1)) else 0
    return Dims((*rest[:start], *picked, *rest[start:]))


@rule("constant_pad_nd", "pad")
def pad(op: Op, x: Dims, widths: list[int], *args: Any) -> Dims:
    out = list(x)
    for i in range(len(widths) // 2):
        if widths[2 * i] or widths[2 * i + 1]:
            op.whole(x[-1 - i], "pads it")
            out[-1 - i] = op.new_whole(int(op.val.shape[-1 - i]), "makes it by padding")
    return Dims(out)
