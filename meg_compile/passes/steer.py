"""What the plan asks of single axes: plan.keep, what stays whole, and plan.shard, what must be sharded.

A pattern is the name of an axis ("ffn"), or a glob for parameters or the modules that hold them ("h.0.mlp.*",
"*.attn"), with a dim behind a colon where one is meant ("h.*.mlp.fc1.weight:0"). Neither changes what the inference
knows: of the axes that can be sharded, those asked for come first and those kept do not come at all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from meg_compile.axes.atoms import Atom, atoms
from meg_compile.axes.infer import Axes
from meg_compile.errors import Fault, Refused, nearest
from meg_compile.graph.nodes import matches, starred
from meg_compile.passes.sequence import find_sequences
from meg_compile.plan import Plan


@dataclass(frozen=True)
class Wish:
    """One of the `axes` must be sharded. pattern: of plan.shard; place: of the model ("h.0.mlp.fc1.weight:0")."""

    pattern: str
    place: str
    axes: frozenset[Atom]


@dataclass(frozen=True)
class Wishes:
    """kept: axes that stay whole, with the pattern of plan.keep. wanted: what must be sharded."""

    kept: dict[Atom, str]
    wanted: list[Wish]

    def reasons(self) -> dict[Atom, str]:
        """Why the kept axes are whole."""
        return {atom: f"kept whole by plan.keep={pattern}" for atom, pattern in self.kept.items()}

    def asked(self) -> dict[Atom, str]:
        """The axes that are asked for, those without an alternative first, with the pattern of plan.shard."""
        found: dict[Atom, str] = {}
        for wish in sorted(self.wanted, key=lambda wish: len(wish.axes)):
            found |= {atom: wish.pattern for atom in wish.axes if atom not in found}
        return found


def read_wishes(axes: Axes, plan: Plan, aliases: Mapping[str, str]) -> Wishes:
    """Refused, with every pattern that matches nothing and the nearest one that would.

    aliases: other names of tied parameters -> the name that they are stored under.
    """
    stored = {name: name for name in axes.stored} | {a: n for a, n in aliases.items() if n in axes.stored}
    words = {word for dims in axes.stored.values() for dim in dims for a in atoms(dim) for word in a.names}
    sequences = find_sequences(axes)
    kept: dict[Atom, str] = {}
    wanted: list[Wish] = []
    faults = []
    for key, pattern in [*(("plan.keep", p) for p in plan.keep), *(("plan.shard", p) for p in plan.shard)]:
        found = _of_axis(pattern, axes) if pattern in words else _of_parameters(pattern, axes, stored)
        if key == "plan.keep" and plan.sp and pattern in words and any(held & sequences for _, held in found):
            problem = "plan.sp=true shards the sequence over the tp ranks"
            faults.append(Fault(key, pattern, problem, "leave one of the two out"))
        elif not found:
            faults.append(_matches_nothing(key, pattern, axes, stored, words))
        elif key == "plan.keep":
            kept |= {atom: pattern for _, held in found for atom in held if atom not in kept}
        else:
            wanted += [Wish(pattern, place, held) for place, held in _demanded(pattern, found, axes)]
    if faults:
        raise Refused(faults)
    return Wishes(kept, wanted)


Found = list[tuple[str, frozenset[Atom]]]


def _of_axis(word: str, axes: Axes) -> Found:
    """Every axis of a name, at the first parameter that has it."""
    places: dict[Atom, str] = {}
    for name, dims in axes.stored.items():
        for atom in (a for dim in dims for a in atoms(dim) if word in a.names):
            places.setdefault(atom, f"{name} ({word} of {atom.size})")
    return [(place, frozenset((atom,))) for atom, place in places.items()]


def _of_parameters(pattern: str, axes: Axes, stored: Mapping[str, str]) -> Found:
    """The parameters that a pattern matches, or one dim of each."""
    path, colon, dim = pattern.partition(":")
    found: dict[str, frozenset[Atom]] = {}
    for name, under in stored.items():
        dims = axes.stored[under]
        if matches(path, name) and (not colon or int(dim) < len(dims)):
            chosen = dims[int(dim) : int(dim) + 1] if colon else dims
            found[f"{under}{colon}{dim}"] = frozenset(a for one in chosen for a in atoms(one))
    return list(found.items())


def _demanded(pattern: str, found: Found, axes: Axes) -> Found:
    """Of what a pattern matches without a dim, the matrices; biases and norms go with what they belong to."""
    matrices = [(place, held) for place, held in found if len(axes.stored.get(place, ())) > 1]
    return matrices or found


def _matches_nothing(key: str, pattern: str, axes: Axes, stored: Mapping[str, str], words: set[str]) -> Fault:
    path, colon, dim = pattern.partition(":")
    if colon and any(matches(path, name) for name in stored):
        sizes = sorted({len(axes.stored[under]) for name, under in stored.items() if matches(path, name)})
        problem = f"what it matches has {sizes[-1]} dims, from 0, and no dim {dim}"
        return Fault(key, pattern, problem, f"use {path}:{max(sizes[-1] - 1, 0)}, say")
    paths = {name.rsplit(".", cut)[0] for name in stored for cut in range(name.count(".") + 1)}
    guess = nearest(path, sorted(paths | {starred(one) for one in paths} | words))
    near = f"did you mean {guess}{colon}{dim}?" if guess else f"the axes are {', '.join(sorted(words))}"
    return Fault(key, pattern, "matches no axis, and no parameter or module that forward reads", near)


def unmet(wishes: Wishes, sharded: frozenset[Atom], reason: Callable[[Atom], str], axes: Axes) -> list[Fault]:
    """What must be sharded and is not: a fault for each pattern and reason.

    reason: why an axis is not sharded.
    """
    alike: dict[tuple[str, str], list[str]] = defaultdict(list)
    for wish in (wish for wish in wishes.wanted if not wish.axes & sharded):
        said = {f"{called(atom)}: {reason(atom)}" for atom in wish.axes}
        alike[wish.pattern, "; ".join(sorted(said)) or "it has one entry"].append(wish.place)
    return [
        Fault("plan.shard", pattern, f"{_first(places)} cannot be sharded: {why}", _fix(places[0], why, sharded, axes))
        for (pattern, why), places in alike.items()
    ]


def _fix(place: str, why: str, sharded: frozenset[Atom], axes: Axes) -> str:
    if "plan.keep=" in why or "plan.shard=" in why:
        return "leave one of the two out"
    if "plan.tp=" in why:
        return "use a plan.tp that divides it, or leave it out"
    name = place.partition(":")[0]
    works = [i for i, dim in enumerate(axes.stored.get(name, ())) if sharded & set(atoms(dim))]
    return f"use {name}:{works[0]}, or leave it out" if works else "leave it out"


def _first(places: list[str]) -> str:
    return places[0] + (f" and {len(places) - 1} more" if len(places) > 1 else "")


def called(atom: Atom) -> str:
    """An axis in words."""
    return "/".join(sorted(atom.names)) or f"an axis of {atom.size}"
