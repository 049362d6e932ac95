"""plan.place: single blocks on stages of the user's choice, by name pattern.

Stages are cut in graph order, and each runs at least one layer; between two placed layers there must be enough others
for the stages between theirs.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from meg_compile.errors import Fault, Refused, any_of, nearest
from meg_compile.graph.nodes import matches, starred
from meg_compile.plan import Plan


def place_layers(names: Sequence[str | None], plan: Plan) -> dict[int, int]:
    """Layer -> the stage that plan.place gives it, both counted from 0.

    names: of the layers in order. Refused for a pattern without a layer, for patterns that contradict each other, and
    for a stage that a layer cannot be on.
    """
    placed: dict[int, int] = {}
    by: dict[int, str] = {}
    faults = []
    for pattern, i in _matched(names, plan):
        key, stage = f"plan.place.{pattern}", plan.place[pattern]
        if placed.get(i, stage) != stage:
            problem = f"plan.place.{by[i]}={placed[i]} puts {names[i]} on another stage"
            faults.append(Fault(key, stage, problem, "leave one of the two out"))
        elif _in_order({**placed, i: stage}, len(names), plan.num_stages):
            placed[i], by[i] = stage, pattern
        else:
            faults.append(_impossible(i, pattern, placed, by, names, plan))
    if faults:
        raise Refused(list({fault.key: fault for fault in reversed(faults)}.values())[::-1])
    return placed


def check_places(stages: Sequence[Sequence[str | None]], plan: Plan) -> None:
    """Refused where plan.place says otherwise than plan.stages. stages: the names of the layers on each."""
    names = [name for stage in stages for name in stage]
    home = [at for at, stage in enumerate(stages) for _ in stage]
    faults: dict[str, Fault] = {}
    for pattern, i in _matched(names, plan):
        if home[i] != plan.place[pattern]:
            problem = f"plan.stages={_shown(plan.stages)} puts {names[i]} on stage {home[i]}"
            fault = Fault(f"plan.place.{pattern}", plan.place[pattern], problem, "leave one of the two out")
            faults.setdefault(pattern, fault)
    if faults:
        raise Refused(faults.values())


def _matched(names: Sequence[str | None], plan: Plan) -> list[tuple[str, int]]:
    """(pattern, a layer that it matches), for all. Refused for a pattern that matches none."""
    found = {p: [i for i, name in enumerate(names) if name and matches(p, name)] for p in plan.place}
    if nothing := [_matches_nothing(pattern, plan.place[pattern], names) for pattern in found if not found[pattern]]:
        raise Refused(nothing)
    return [(pattern, i) for pattern, layers in found.items() for i in layers]


def _in_order(placed: Mapping[int, int], num_layers: int, num_stages: int) -> bool:
    """Whether the layers can be cut in order into stages of at least one, with these where they are placed."""
    known = [(-1, -1), *sorted(placed.items()), (num_layers, num_stages)]
    inside = all(0 <= stage < num_stages for stage in placed.values())
    return inside and all(0 <= t - s <= j - i for (i, s), (j, t) in itertools.pairwise(known))


def _impossible(
    at: int, pattern: str, placed: Mapping[int, int], by: Mapping[int, str], names: Sequence[str | None], plan: Plan
) -> Fault:
    stages = range(plan.num_stages)
    works = [str(s) for s in stages if _in_order({**placed, at: s}, len(names), plan.num_stages)]
    others = dict.fromkeys(f"plan.place.{by[i]}={placed[i]}" for i in placed)
    beside = f", beside {' and '.join(others)}" if others else ""
    run = f"{plan.num_stages} stages run in order, at least one each"
    problem = f"{names[at]} is block {at + 1} of {len(names)}, which {run}{beside}"
    fix = f"use stage {any_of(works)}" if works else "leave it out"
    return Fault(f"plan.place.{pattern}", plan.place[pattern], problem, fix)


def _matches_nothing(pattern: str, stage: int, names: Sequence[str | None]) -> Fault:
    known = [name for name in names if name]
    guess = nearest(pattern, [*known, *dict.fromkeys(map(starred, known))])
    there = f"{known[0]} to {known[-1]}" if len(known) > 1 else "".join(known)
    hint = f"did you mean {guess}? The" if guess else "the"
    fix = f"{hint} blocks are {there}; what comes before goes with the first, what comes after with the last"
    return Fault(f"plan.place.{pattern}", stage, "matches no block of the model", fix)


def _shown(stages: Sequence[int] | str | None) -> str:
    return stages if isinstance(stages, str) else f"[{','.join(map(str, stages or ()))}]"
