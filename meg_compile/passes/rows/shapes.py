"""What operators do with the rows of a batch that only move, pick and join entries."""

from __future__ import annotations

from typing import Any

from torch import fx

from meg_compile.passes.rows.call import Call, pointwise, rule, tensors
from meg_compile.passes.rows.state import Const, Couples, Piece, Rows, State, Unclear, reshaped

VIEWS = set("view reshape _unsafe_view flatten unflatten squeeze unsqueeze view_as reshape_as ravel".split())
PERMUTES = set("transpose swapaxes swapdims t permute numpy_T mT adjoint movedim moveaxis".split())


@rule(*VIEWS)
def view(call: Call) -> State:
    rows, before = call.rows()
    pieces = reshaped_by(call, rows.pieces, before)
    if pieces is None:
        raise Unclear("it reshapes across the rows")
    return Rows(pieces)


def reshaped_by(call: Call, pieces: tuple[Piece, ...], before: list[int]) -> tuple[Piece, ...] | None:
    """As `reshaped`; of these operators two say which dim of size 1 comes and goes."""
    after = call.shape
    if call.name == "unsqueeze":
        at = call["dim"] % len(after)
        return tuple(p._replace(dim=p.dim + (p.dim >= at)) for p in pieces)
    if call.name == "squeeze" and all(before[p.dim] > 1 for p in pieces):
        chosen = range(len(before)) if call["dim"] is None else _list(call["dim"])
        gone = {d % len(before) for d in chosen if before[d] == 1}
        return tuple(p._replace(dim=p.dim - sum(d < p.dim for d in gone)) for p in pieces)
    return pieces if before == after else reshaped(pieces, before, after)


def _list(dim: Any) -> list[int]:
    return [dim] if isinstance(dim, int) else list(dim)


@rule("view_as_complex", "view_as_real")
def complex_numbers(call: Call) -> State:
    rows, shape = call.rows()
    if call.name == "view_as_complex" and any(piece.dim == len(shape) - 1 for piece in rows.pieces):
        raise Unclear("it makes one number of two rows")
    return rows


@rule(*PERMUTES)
def permute(call: Call) -> State:
    rows, shape = call.rows()
    order = order_of(call, len(shape))
    return rows.moved({d: order.index(d) for d in range(len(shape))})


def order_of(call: Call, ndim: int) -> list[int]:
    """For each dim of the result the one that it was."""
    order = list(range(ndim))
    numbers: Any = call.node.args[1:]
    if call.name == "permute":
        return [d % ndim for d in call["dims"]]
    if call.name == "numpy_T":
        return order[::-1]
    if call.name in ("movedim", "moveaxis"):
        source, target = (_list(n) for n in numbers)
        pairs = sorted((t % ndim, s % ndim) for s, t in zip(source, target, strict=True))
        rest = [d for d in order if d not in {s for _, s in pairs}]
        for to, was in pairs:
            rest.insert(to, was)
        return rest
    if ndim > 1:
        i, j = numbers or (-2, -1)
        order[i], order[j] = order[j], order[i]
    return order


@rule("expand", "broadcast_to")
def expand(call: Call) -> State:
    rows, shape = call.rows()
    lead = len(call.shape) - len(shape)
    return rows.moved({d: d + lead for d in range(len(shape))})


@rule("repeat")
def repeat(call: Call) -> State:
    return expand(call)  # the copies of a dim are major to it


@rule("repeat_interleave")
def repeat_interleave(call: Call) -> State:
    rows, _ = call.rows()
    dim, times = call["dim"], call["repeats"]
    if not isinstance(dim, int) or not isinstance(times, int):
        raise Unclear("how often it repeats depends on the data")
    at = dim % len(call.shape)
    return Rows(tuple(p._replace(inner=p.inner * times) if p.dim == at else p for p in rows.pieces))


@rule("select", "unbind")
def select(call: Call) -> Any:
    rows, shape = call.rows()
    at = (call["dim"] or 0) % len(shape)
    if at in rows.dims:
        raise Couples("it picks single rows")
    found = rows.moved({d: d - (d > at) for d in range(len(shape))})
    return found if call.name == "select" else [found] * len(call.val)


@rule("slice", "narrow", "split", "split_with_sizes", "chunk", "tensor_split", "unsafe_split", "unsafe_chunk")
def cut(call: Call) -> Any:
    rows, shape = call.rows()
    at = (call["dim"] or 0) % len(shape)
    outs: list[Any] = list(call.val) if isinstance(call.val, (list, tuple)) else [call.val]
    block = max((p.inner * p.size for p in rows.pieces if p.dim == at), default=1)
    sizes = {int(v.shape[at]) for v in outs}
    strided = call["step"] not in (None, 1)
    if at in rows.dims and sizes != {shape[at]}:
        starts = (call["start"] or 0) % block if call.name in ("slice", "narrow") else 0
        if starts or strided or any(size % block for size in sizes) or not _is_whole(rows, at):
            raise Couples("it picks some of the rows")
    return [rows] * len(outs) if isinstance(call.val, (list, tuple)) else rows


def _is_whole(rows: Rows, dim: int) -> bool:
    return rows.dims == {dim} and len(rows.pieces) == 1


@rule("cat", "concat", "concatenate", "stack")
def join(call: Call) -> State:
    nodes: list[fx.Node] = call["tensors"]
    at = (call["dim"] or 0) % len(call.shape)
    ndim = len(call.shape_of(nodes[0]))
    found = pointwise(call, nodes, ndim)
    if call.name == "stack":
        return found.moved({d: d + (d >= at) for d in range(ndim)})
    if at in found.dims and not (
        _is_whole(found, at) and all(isinstance(call.state(n), Rows) and call.shape_of(n)[at] for n in nodes)
    ):
        raise Couples("it joins rows with others")
    return found


@rule("constant_pad_nd", "pad")
def pad(call: Call) -> State:
    rows, shape = call.rows()
    widths = call["pad"]
    padded = {len(shape) - 1 - i for i in range(len(widths) // 2) if widths[2 * i] or widths[2 * i + 1]}
    if rows.dims & padded:
        raise Couples("it adds rows")
    return rows


@rule("tril", "triu")
def triangle(call: Call) -> State:
    rows, shape = call.rows()
    if rows.dims & {len(shape) - 1, len(shape) - 2} and max(p.size for p in rows.pieces) > 1:
        raise Couples("it keeps a triangle of rows")
    return rows


@rule("index_select")
def index_select(call: Call) -> State:
    at = call["dim"] % len(call.shape)
    index = call.state(call["index"])
    if isinstance(index, Const):
        rows, _ = call.rows()
        if at in rows.dims:
            raise Couples("it picks some of the rows")
        return rows
    rows, _ = call.rows("index")
    return Rows(tuple(p._replace(dim=at) for p in rows.pieces))


@rule("index")
def index(call: Call) -> State:
    """x[i, j]: each row picks of itself where an index numbers the rows (torch.arange(B))."""
    x, at = call["self"], list(call["indices"])
    state, shape = call.state(x), call.shape_of(x)
    where = [i for i, a in enumerate(at) if a is not None]
    start = where[0] if where == list(range(where[0], where[-1] + 1)) else 0
    chosen = tensors(at)
    picked = max(len(call.shape_of(n)) for n in chosen)
    asked = [n for n in chosen if isinstance(call.state(n), Rows)]
    if isinstance(state, Rows) and not state.dims & set(where):
        if asked:
            raise Couples("it picks of other rows")
        rest = [d for d in range(len(shape)) if d not in where]
        return state.moved({d: i + picked * (i >= start) for i, d in enumerate(rest)})
    if isinstance(state, Rows):
        (piece,) = state.pieces if len(state.pieces) == 1 else (None,)
        numbers = call.state(at[piece.dim]) if piece else None
        if piece is None or not isinstance(numbers, Const) or not numbers.numbers or shape[piece.dim] != piece.size:
            raise Couples("it picks rows of the batch")
        lead = picked - len(call.shape_of(at[piece.dim]))
        found = Rows(tuple(p._replace(dim=p.dim + lead) for p in numbers.numbers))
        if asked and pointwise(call, asked, picked) != found:
            raise Couples("it picks of other rows")
    else:
        found = pointwise(call, chosen, picked)
    return Rows(tuple(p._replace(dim=p.dim + start) for p in found.pieces))
