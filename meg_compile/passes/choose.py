"""Choose which axes to shard over the tp ranks.

A Megatron pair is an axis that one linear map produces and a later one contracts, with nothing on the way that
needs it whole (Shoeybi et al. 2019, arXiv:1909.08053, section 3). A vocabulary is one that an embedding looks up, or
that a cross entropy classifies over. The axes that move most weight for least traffic come first; two that meet in one
tensor cannot both be sharded. What plan.shard asks for comes before these, what plan.keep names does not come
(`passes/steer.py`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from meg_compile.axes.atoms import Atom, atoms, branches, leaves
from meg_compile.axes.infer import Axes
from meg_compile.axes.layout import Layout
from meg_compile.axes.op import each
from meg_compile.errors import Fault, Refused, any_of
from meg_compile.graph.nodes import in_source, operand
from meg_compile.passes.steer import called, read_wishes, unmet
from meg_compile.plan import Plan


@dataclass
class Choice:
    """The layout that was chosen, and for each axis that could have been sharded and is not, why."""

    layout: Layout
    refused: dict[Atom, str] = field(default_factory=dict)


def choose(axes: Axes, plan: Plan, aliases: Mapping[str, str] | None = None) -> Choice:
    """Refused, naming every axis that tp does not divide and for which none stands in, unless plan.strict is off (then
    they stay whole), and all that plan.shard asks for and that cannot be.

    aliases: other names of tied parameters, for the patterns of plan.keep and plan.shard.
    """
    if plan.tp == 1 and not (plan.keep or plan.shard):
        return Choice(Layout(1, frozenset()))
    found = find_candidates(axes)
    wishes = read_wishes(axes, plan, aliases or {})
    if plan.tp == 1:
        return Choice(Layout(1, frozenset()))
    found.asked = {atom: pattern for atom, pattern in wishes.asked().items() if atom in found.able}
    found.ranked = [*found.asked, *(atom for atom in found.ranked if atom not in found.asked)]
    near = _neighbours(axes, set(found.ranked))
    banned = wishes.reasons()
    choice = _settle(axes, found, near, banned, plan.tp)
    dropped: set[Atom] = set()
    while indivisible := _indivisible(choice, found):
        dropped |= indivisible
        behind = {a for a in choice.refused if near[a] & indivisible and not _stands_in(a, plan.tp)}
        banned |= {a: f"plan.tp={plan.tp} does not divide its neighbour in a tensor" for a in behind - banned.keys()}
        banned |= {a: f"plan.tp={plan.tp} does not divide {a.size}" for a in indivisible}
        choice = _settle(axes, found, near, banned, plan.tp)
    lost = [a for a in found.ranked if a in dropped and not any(b.repeated for b in near[a] & choice.layout.sharded)]
    if lost and plan.strict:
        raise Refused(_faults(axes, lost, near, plan.tp))
    if faults := unmet(wishes, choice.layout.sharded, lambda atom: _reason(atom, choice, found), axes):
        raise Refused(faults)
    return choice


def _stands_in(atom: Atom, tp: int) -> bool:
    """Whether an axis is sharded where tp does not divide its neighbour: the queries that share keys and values are,
    each rank with some of every group, and keys and values stay whole."""
    return atom.repeated and atom.size % tp == 0


def _indivisible(choice: Choice, found: Candidates) -> set[Atom]:
    """The chosen axes that tp does not divide and that cannot be padded."""
    layout = choice.layout
    return {a for a in layout.sharded if a.size % layout.tp and a not in found.paddable}


def _settle(axes: Axes, found: Candidates, near: dict[Atom, set[Atom]], banned: dict[Atom, str], tp: int) -> Choice:
    """Place what is not banned, banning what cannot be sharded in all parts of a tensor, until nothing is."""
    while True:
        choice = _place(found, near, banned, tp)
        uneven = _uneven(axes, choice.layout)
        if not uneven:
            return choice
        banned |= dict.fromkeys(uneven, "another part of the same tensor stays whole")


@dataclass
class Candidates:
    """Axes worth sharding.

    ranked:   best first.
    paddable: those of which a rank may hold fewer real entries than others.
    able:     those that can be sharded, frozen ones too.
    unable:   why others of the parameters cannot.
    asked:    those that come first because of a pattern of plan.shard.
    """

    ranked: list[Atom]
    paddable: set[Atom]
    able: set[Atom]
    unable: dict[Atom, str]
    asked: dict[Atom, str] = field(default_factory=dict)


def find_candidates(axes: Axes) -> Candidates:
    produced: set[Atom] = set()
    contracted: set[Atom] = set()
    mixed: dict[Atom, str] = {}
    vocabularies: set[Atom] = set()
    of_inputs: set[Atom] = set()
    weight: dict[Atom, float] = defaultdict(float)
    traffic: dict[Atom, float] = defaultdict(float)
    for op in axes.ops.values():
        if op.node.op == "placeholder":
            of_inputs.update(a for dims in each(op.out) for dim in dims for a in atoms(dim))
        if op.node.op == "get_attr" and op.grad:
            for dim in op.out:
                parts = branches(dim)
                for atom in (a for part in parts for a in part):
                    weight[atom] += op.val.numel() / len(parts)
        if op.node.op != "call_function":
            continue
        summed = {a for dim in op.summed for a in atoms(dim)}
        if op.classes is not None:
            vocabularies.update(atoms(op.classes))
        if op.lookup is not None:
            if not axes.ops[operand(op.node, 1)].constant:
                vocabularies.update(summed)
        elif 0 < len(op.weights) < len(op.operands):
            produced |= {a for w in op.weights for d in w for a in atoms(d)} - summed if summed else set()
            contracted |= summed
        else:
            mixed |= dict.fromkeys(summed, f"{op.name}{in_source(op.node)} sums over it without a weight")
        for atom in summed:
            traffic[atom] += op.val.numel()
    pairs = produced & contracted
    for op in axes.ops.values():
        for found in (leaves(dim) for dim in op.summed):
            if len(found) == 1 and found[0] in pairs and not found[0].names:
                found[0].names.add("ffn")
    able = {a for a in pairs | vocabularies if a.whole is None and a not in mixed and a not in of_inputs}
    ranked = sorted((a for a in weight if a in able), key=lambda a: -weight[a] / (1 + traffic[a]))
    unable = dict.fromkeys(produced - contracted, "no later Linear contracts it")
    unable |= dict.fromkeys(contracted - produced, "no Linear produces it")
    unable |= mixed | dict.fromkeys(of_inputs, "it is an axis of the data")
    return Candidates(ranked, vocabularies - contracted - _inner(axes), able, unable)


def _reason(atom: Atom, choice: Choice, found: Candidates) -> str:
    """Why an axis of a parameter is not sharded."""
    if atom.whole:
        return f"it is needed whole: {atom.whole}"
    return choice.refused.get(atom) or found.unable.get(atom) or "no Linear produces or contracts it"


def _inner(axes: Axes) -> set[Atom]:
    """Axes that somewhere lie inside another or in a part of a dim, so that padding would not come last."""
    dims = {dim for op in axes.ops.values() for dims in op.shapes() for dim in dims}
    found: set[Atom] = set()
    for dim in dims:
        first, *rest = leaves(dim) or (None,)
        found.update(atoms(rest))
        if first is not None and first.segments is not None:
            found.update(atoms((first,)))
    return found


def _neighbours(axes: Axes, wanted: set[Atom]) -> dict[Atom, set[Atom]]:
    """The wanted atoms that each one meets in some tensor; itself, where it stands there twice."""
    near: dict[Atom, set[Atom]] = defaultdict(set)
    for op in axes.ops.values():
        for dims in op.shapes():
            rows: list[list[Atom]] = [[]]
            for dim in dims:
                rows = [row + [a for a in branch if a in wanted] for row in rows for branch in branches(dim)]
            for row in rows:
                for i, atom in enumerate(row):
                    near[atom].update(row[:i], row[i + 1 :])
    return near


def _place(found: Candidates, near: dict[Atom, set[Atom]], banned: dict[Atom, str], tp: int) -> Choice:
    chosen: set[Atom] = set()
    refused = dict(banned)
    for atom in found.ranked:
        if atom in banned:
            continue
        if atom in near[atom]:
            refused[atom] = "it stands twice in one tensor"
        elif met := near[atom] & chosen:
            other = min(met, key=lambda a: (a not in found.asked, sorted(a.names), a.size))
            by = f", by plan.shard={found.asked[other]}" if other in found.asked else ""
            refused[atom] = f"{called(other)} of the same tensor is sharded instead{by}"
        else:
            chosen.add(atom)
    return Choice(Layout(tp, frozenset(chosen)), refused)


def _uneven(axes: Axes, layout: Layout) -> set[Atom]:
    dims = {d for op in axes.ops.values() for dims in op.shapes() for d in dims if layout.holds(d)}
    return {a for d in dims if not layout.even(d) for a in atoms(d) if a in layout.sharded}


def _faults(axes: Axes, indivisible: list[Atom], near: dict[Atom, set[Atom]], tp: int) -> list[Fault]:
    """One fault per kind of axis (name and size), naming a parameter that has it and the tp that works."""
    kinds: dict[tuple[str, int], list[str]] = defaultdict(list)
    works: dict[tuple[str, int], set[int]] = {}
    for atom in indivisible:
        holders = [n for n, dims in axes.stored.items() if any(atom in atoms(d) for d in dims)]
        kind = "/".join(sorted(atom.names)) or "axis", atom.size
        kinds[kind] += holders
        others = (b for b in near[atom] if b.repeated and not _uneven(axes, Layout(tp, frozenset({b}))))
        works[kind] = {n for axis in (atom, *others) for n in _divisors(axis.size)}
    common = set.intersection(*works.values())
    return [
        Fault(
            "plan.tp",
            tp,
            f"does not divide the {size} {word} of {holders[0]}"
            + (f" and {len(holders) - 1} more" * (len(holders) > 1)),
            f"use {_spell(works[word, size])}"
            + (f" (for all of these: {_spell(common)})" if len(kinds) > 1 else "")
            + ", or plan.strict=false to keep these layers whole",
        )
        for (word, size), holders in kinds.items()
    ]


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _spell(sizes: set[int]) -> str:
    return any_of([str(size) for size in sorted(sizes)])
