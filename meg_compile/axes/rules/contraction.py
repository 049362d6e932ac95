"""Sums of products: linear maps, matrix products, einsum, attention, sums and means."""

from __future__ import annotations

from typing import Any

import torch

from meg_compile.axes.atoms import Dim, Dims, atoms, leaves, mark_produced, name, repeats, size_of, unify
from meg_compile.axes.op import Op, rule
from meg_compile.axes.rules.elementwise import broadcast

aten = torch.ops.aten


def contract(op: Op, equation: str, *operands: Dims) -> Dims:
    """Operands share a dim per label of an einsum equation; labels that the result lacks are summed over."""
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    if not arrow:
        once = sorted(c for c in set(inputs) if c.isalpha() and inputs.count(c) == 1)
        output = ("..." if "..." in inputs else "") + "".join(once)
    bound: dict[str, Dim] = {}
    batch: list[Dims] = []
    for labels, dims in zip(inputs.split(","), operands, strict=True):
        before, _, after = labels.partition("...")
        stop = len(dims) - len(after)
        batch.append(Dims(dims[len(before) : stop]))
        for label, dim in zip(before + after, dims[: len(before)] + dims[stop:], strict=True):
            if (before + after).count(label) > 1:
                op.whole(dim, "takes a diagonal of it")
            if bound.get(label) and dim:
                unify(bound[label], dim)
            bound[label] = bound.get(label) or dim
            if op.is_weight(dims) and label in output:
                mark_produced(dim)
    middle = broadcast(*batch)
    op.space = Dims((*bound.values(), *middle))
    op.work = 2
    before, dots, after = output.partition("...")
    op.sum(*(dim for label, dim in bound.items() if label not in output), *(() if dots else middle))
    return Dims([bound[c] for c in before] + list(middle if dots else ()) + [bound[c] for c in after])


@rule("linear")
def linear(op: Op, x: Dims, weight: Dims, bias: Dims | None = None) -> Dims:
    out = contract(op, "...i,oi->...o", x, weight)
    if bias is None:
        return out
    op.split_bias = aten.linear.default, (0, 1), 2
    return broadcast(out, bias)


@rule("addmm", "baddbmm")
def addmm(op: Op, bias: Dims, x: Dims, y: Dims, *, beta: float = 1, alpha: float = 1) -> Dims:
    target, equation = (aten.bmm.default, "bmk,bkn->bmn") if len(x) == 3 else (aten.mm.default, "mk,kn->mn")
    if (alpha, beta) != (1, 1):
        op.whole(x[-1], "scales its sum")
    out = contract(op, equation, x, y)
    op.split_bias = target, (1, 2), 0
    return broadcast(out, bias)


@rule("mm", "bmm", "mv", "dot", "matmul")
def matmul(op: Op, x: Dims, y: Dims) -> Dims:
    left = "k" if len(x) == 1 else "...mk"
    right = "k" if len(y) == 1 else "...kn"
    dots = "..." if "..." in left + right else ""
    return contract(op, f"{left},{right}->{dots}{'m' * ('m' in left)}{'n' * ('n' in right)}", x, y)


@rule("einsum")
def einsum(op: Op, equation: str, operands: list[Dims], path: Any = None) -> Dims:
    return contract(op, equation, *operands)


@rule("grouped_mm", "_grouped_mm", "transformers::grouped_mm_fallback")
def grouped(op: Op, x: Dims, weights: Dims, ends: Dims | None = None, bias: Dims | None = None, *_: Any) -> Dims:
    """Rows of x [S, k] in consecutive groups, each times the matrix of its own expert, of weights [E, k, n]."""
    op.whole(weights[0], "has a group of rows for each of it")
    op.whole(x[0], "groups it")
    if len(x) != 2 or len(weights) != 3 or bias is not None:
        return op.unknown()
    matrix = Dims(weights[1:])
    op.weights += [matrix] * op.is_weight(weights)
    return contract(op, "sk,kn->sn", x, matrix)


@rule("sum", "mean")
def reduction(op: Op, x: Dims, dim: int | list[int] | None = None, keepdim: bool = False, **kwargs: Any) -> Dims:
    chosen = [dim] if isinstance(dim, int) else dim or range(len(x))
    gone = {d % len(x) for d in chosen}
    op.sum(*(x[d] for d in sorted(gone)))
    op.average = op.name == "mean"
    return Dims(() if i in gone else d for i, d in enumerate(x) if keepdim or i not in gone)


@rule("scaled_dot_product_attention")
def attention(
    op: Op,
    q: Dims,
    k: Dims,
    v: Dims,
    mask: Dims | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Dims:
    if enable_gqa and size_of(q[-3]) != size_of(k[-3]):
        unify(q[-3], k[-3] + repeats(size_of(q[-3]) // size_of(k[-3])))
        broadcast(Dims(k[:-2]), Dims(v[:-2]))
        broadcast(Dims(q[:-3]), Dims(k[:-3]))
        batch = Dims(q[:-2])
    else:
        batch = broadcast(Dims(q[:-2]), Dims(k[:-2]), Dims(v[:-2]))
    unify(q[-1], k[-1])
    unify(k[-2], v[-2])
    op.whole(q[-1], "contracts it inside its softmax")
    op.whole(k[-2], "takes a softmax over it")
    if is_causal:
        op.whole(q[-2], "masks by position")
    if mask is not None:
        broadcast(mask, Dims((*batch, q[-2], k[-2])))
    op.attends = q, k, v, mask
    op.operands = [dims for dims in op.attends if dims is not None]
    op.space = Dims((*batch, q[-2], k[-2], q[-1]))
    op.work = 4
    if len(q) > 2:
        heads = leaves(q[-3])
        name(heads[:1], "heads" if len(heads) == 1 else "kv_heads")  # queries that share keys are minor to them
    name(q[-1], "head_dim")
    if not any("head_dim" in atom.names for atom in atoms(v[-1])):
        name(v[-1], "v_head_dim")
    return Dims((*batch, q[-2], v[-1]))


@rule("exact_attention")
def exact_attention(
    op: Op, q: Dims, k: Dims, v: Dims, mask: Dims | None, causal: bool, scale: float | None, gqa: bool, *draw: Any
) -> Dims:
    out = attention(op, q, k, v, mask, 0.0, causal, scale=scale, enable_gqa=gqa)
    assert op.space is not None
    op.drawn = Dims(op.space[:-1])
    return out


@rule("context_attention")
def context_attention(
    op: Op, q: Dims, k: Dims, v: Dims, mask: Dims | None, causal: bool, scale: float | None, gqa: bool, *draw: Any
) -> Dims:
    out = cached_attention(op, q, k, v, mask, causal, scale, gqa)
    assert op.space is not None
    op.drawn = Dims(op.space[:-1]) if len(draw) > 1 else None
    return out


@rule("cached_attention")
def cached_attention(
    op: Op, q: Dims, k: Dims, v: Dims, mask: Dims | None, causal: bool, scale: float | None, gqa: bool, *at: Any
) -> Dims:
    """With a mask of all positions, of which keys and values are a part."""
    out = attention(op, q, k, v, None, 0.0, causal, scale=scale, enable_gqa=gqa)
    assert op.space is not None
    if mask is not None:
        broadcast(Dims(mask[:-2]), Dims(op.space[:-3]))
        op.whole(mask[-2] + mask[-1], "is of all positions")
        op.operands.append(mask)
    return out
