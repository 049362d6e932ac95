"""Operators without a rule: where they stand in the user's source, and what stays whole because of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from meg_compile.axes.op import NO_RULE, Op
from meg_compile.explain.linears import find_linears
from meg_compile.graph.nodes import source_line, starred

if TYPE_CHECKING:
    from meg_compile.program import Program


@dataclass(frozen=True)
class Unruled:
    """An operator that no rule knows, so that all it touches stays whole; of equal blocks once.

    times:   how often the model runs it there.
    linears: those that stay whole since it touches what they make or take ("h.*.mlp.fc1").
    share:   of the model's floating-point operations, those of these Linears.
    """

    operator: str
    source: str
    times: int
    linears: tuple[str, ...]
    share: float


def find_unruled(program: Program) -> list[Unruled]:
    """In the order of the graph."""
    groups: dict[tuple[str, str], list[Op]] = {}
    for node, op in program.axes.ops.items():
        if node.op == "call_function" and not op.ruled and not op.constant:
            groups.setdefault((op.name, source_line(node)), []).append(op)
    linears = [x for x in find_linears(program) if x.role == "whole"] if groups else []
    total = program.parallel_flops().total or 1
    found = []
    for (name, source), ops in groups.items():
        reasons = {op.because(NO_RULE) for op in ops}
        lost = [x for x in linears if any(atom.whole in reasons for atom in x.produced | x.contracted)]
        modules = tuple(dict.fromkeys(starred(x.module) for x in lost))
        found.append(Unruled(name, source, len(ops), modules, sum(x.flops for x in lost) / total))
    return found
