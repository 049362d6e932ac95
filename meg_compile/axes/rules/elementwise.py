"""Entry by entry: operands broadcast together, and nothing is needed whole."""

from __future__ import annotations

from typing import Any

from meg_compile.axes.atoms import Dim, Dims, unify
from meg_compile.axes.op import Op, each, rule


def broadcast(*shapes: Dims) -> Dims:
    """The common shape, aligned at the right; dims of size 1 stretch."""
    out: list[Dim] = []
    for i in range(1, max(map(len, shapes), default=0) + 1):
        dims = [s[-i] for s in shapes if len(s) >= i and s[-i]]
        for dim in dims[1:]:
            unify(dims[0], dim)
        out.insert(0, dims[0] if dims else ())
    return Dims(out)


@rule(
    *"""add sub rsub mul div true_divide floor_divide remainder fmod pow neg abs sign sgn positive
    exp log log1p expm1 sqrt rsqrt reciprocal square sin cos tan atan2 tanh sigmoid erf floor ceil round
    relu relu6 gelu silu mish elu celu selu leaky_relu hardswish hardtanh softplus threshold logsigmoid
    clamp clamp_min clamp_max minimum maximum max.other min.other where masked_fill nan_to_num isnan isinf
    eq ne lt le gt ge logical_and logical_or logical_not bitwise_and bitwise_or bitwise_not __and__ __or__
    addcmul addcdiv lerp to _to_copy float half double contiguous clone detach alias lift_fresh lift_fresh_copy
    dropout polar complex real imag angle conj _conj conj_physical resolve_conj""".split()
)
def elementwise(op: Op, *args: Any, **kwargs: Any) -> Dims:
    return broadcast(*each(args, kwargs))


@rule(*"zeros_like ones_like full_like empty_like rand_like randn_like type_as expand_as fill".split())
def shaped_like(op: Op, x: Dims, *args: Any, **kwargs: Any) -> Dims:
    """The first operand's shape; another operand lends its type, or the shape to stretch to."""
    if op.name == "expand_as":
        return broadcast(x, *each(args))
    op.operands = [x]
    return x


@rule("exact_dropout")
def exact_dropout(op: Op, x: Dims, keys: Dims, *draw: Any) -> Dims:
    op.operands = [x]
    op.drawn = x
    return x
