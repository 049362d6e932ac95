"""Fewer heads of keys and values than tp ranks: each has some queries of every group, and keys and values whole."""

from functools import partial

import pytest
from compare import check, compile_case
from zoo import ENDS, PAIR, QKVO, case, lm
from zoo_layers import Expanded, Grouped, GroupedFused, Heads, Interleaved, Rotary

from meg_compile.errors import Refused
from meg_compile.plan import Plan

QUERIES = ("*.attn.q.weight", "*.attn.q.bias", "*.attn.o.weight")


class RotaryGrouped(Rotary, Grouped):
    """Keys are turned, on every rank alike, before they meet the queries."""


def grouped(attn: type[Heads], kv: int, heads: int = 8, layers: int = 1):
    return case(lm(partial(attn, heads=heads, kv=kv), layers=layers), *QKVO, *PAIR, *ENDS)


@pytest.mark.parametrize(
    ("attn", "kv", "plan"),
    [
        (Interleaved, 2, Plan(tp=4)),
        (Expanded, 2, Plan(tp=4)),
        (Expanded, 1, Plan(tp=2, sp=True)),
        (RotaryGrouped, 2, Plan(tp=4)),
        (Interleaved, 1, Plan(tp=4)),
        (Grouped, 1, Plan(tp=2)),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_queries_are_sharded_and_keys_and_values_are_whole(attn, kv, plan):
    program = check(grouped(attn, kv), plan, 2, sharded=(*QUERIES, *PAIR, *ENDS))
    assert kv == 1 or f"tp=4 does not divide {kv}" in program.explain()


def test_across_stages():
    check(grouped(Grouped, 2, layers=2), Plan(tp=4, pp=2), 2, sharded=(*QUERIES, *PAIR, *ENDS))


def test_keys_and_values_are_sharded_where_tp_divides_them():
    check(grouped(Grouped, 2), Plan(tp=2), 2)


def test_what_neither_divides_is_refused_with_what_does():
    with pytest.raises(
        Refused, match=r"plan.tp=8: does not divide the 2 kv_heads of .*; use 1, 2 or 4, or plan.strict"
    ):
        compile_case(grouped(Grouped, 2), Plan(tp=8), 2)
    kept = compile_case(grouped(Grouped, 2), Plan(tp=8, strict=False), 2)
    assert not any(spec.sharded for name, spec in kept.params.items() if ".attn." in name)
    assert kept.params["h.0.mlp.fc1.weight"].sharded


def test_one_projection_for_all_three_stays_whole():
    """Its queries cannot be cut without its keys."""
    fused = case(lm(partial(GroupedFused, kv=2, group=4), layers=1), *PAIR, *ENDS)
    with pytest.raises(Refused, match=r"plan.tp=4: does not divide the 2 kv_heads of .*; use 1 or 2, or plan.strict"):
        compile_case(fused, Plan(tp=4), 2)
    check(fused, Plan(tp=4, strict=False), 2)
