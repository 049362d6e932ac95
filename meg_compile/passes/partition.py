"""Cut a graph into pipeline stages.

In:  a graph over local tensors with its values' shapes.
Out: one graph per stage. A stage receives the activations that cross its start, reads the batch's fields that it
     needs, and returns the activations that cross its end, or the loss. What depends on no activation (positions,
     masks, a parameter's cast) is computed again in every stage that reads it, rather than sent.

Cuts lie between layers (`passes/layers.py`); a layout by hand also cuts off what comes before the first block and after
the last. A stage may run nothing of its own and pass on what it receives.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import fx

from meg_compile.errors import Fault, Refused
from meg_compile.graph.nodes import BOUND, operand, upstream
from meg_compile.passes.in_place import not_across
from meg_compile.passes.layers import Layer, find_layers, find_towers, starts_anew, take_ends
from meg_compile.passes.place import check_places, place_layers
from meg_compile.plan import Plan
from meg_compile.stage_layout import read_layout


@dataclass
class Stage:
    """One pipeline stage.

    graph:    placeholders are the received activations (`received`), then fields of the batch (`fields`).
    received: the activations that come from the stage before, on meta, with the shapes of one rank; those that have a
              gradient to send back require one.
    sent:     those that go to the next; empty for the last stage, which returns the loss.
    params:   names of the parameters and buffers that it reads.
    layers:   the layers that it runs, in order; none where it only passes on, or runs an end of the model.
    cost:     its share of a step, in floating-point operations.
    """

    index: int
    graph: fx.Graph
    received: tuple[torch.Tensor, ...]
    sent: tuple[torch.Tensor, ...]
    fields: tuple[str, ...]
    params: tuple[str, ...]
    layers: tuple[str, ...]
    cost: float


def partition(graph: fx.Graph, plan: Plan) -> list[Stage]:
    """Refused where the model has fewer layers than stages, or cannot be cut as plan.stages, .split or .place say."""
    layers = find_layers(graph)
    if isinstance(plan.stages, str):
        groups = _by_layout(layers, plan.stages)
    else:
        groups, start = [], 0
        for count in _counts(layers, plan):
            groups.append(layers[start : start + count])
            start += count
    if plan.stages is not None:
        check_places([[layer.name for layer in group] for group in groups], plan)
    return [_stage(graph, groups, i) for i in range(len(groups))]


def _by_layout(layers: list[Layer], layout: str) -> list[list[Layer]]:
    """The layers of every stage of a layout; the ends of the model have no name."""
    letters = read_layout(layout)
    ends = take_ends(layers)
    if ends is None:
        problem = "the model has no numbered blocks for its letters to stand for"
        raise Refused(Fault("plan.stages", layout, problem, "use null for a balanced cut, or a list of counts"))
    if (num := sum(map(len, letters)) - 2) != len(layers):
        fix = f"write t {len(layers)} times, as in {_example_layout(len(layers), len(letters))}"
        raise Refused(Fault("plan.stages", layout, f"{num} blocks, and the model has {len(layers)}", fix))
    if letters[0] == "E" and not ends["E"].nodes:
        problem = "nothing of the model comes before its first block, so a stage of E alone has nothing to send"
        raise Refused(Fault("plan.stages", layout, problem, "put the first block beside it, as Et"))
    blocks = iter(layers)
    return [[next(blocks) if letter == "t" else ends[letter] for letter in stage] for stage in letters]


def _example_layout(num_layers: int, num_stages: int) -> str:
    return "E" + "|".join("t" * count for count in _even(num_layers, num_stages)) + "L"


def _counts(layers: list[Layer], plan: Plan) -> list[int]:
    """How many layers each stage runs."""
    if plan.stages is not None and not isinstance(plan.stages, str):
        if len(plan.stages) != plan.num_stages or sum(plan.stages) != len(layers) or min(plan.stages) < 1:
            raise Refused(
                Fault(
                    "plan.stages",
                    list(plan.stages),
                    f"must cut {len(layers)} layers into {plan.num_stages} stages of at least one layer",
                    f"for example {_even(len(layers), plan.num_stages)}",
                )
            )
        return list(plan.stages)
    if len(layers) < plan.num_stages:
        key = "plan.pp" if plan.vpp == 1 else "plan.pp x plan.vpp"
        raise Refused(
            Fault(
                key,
                plan.num_stages,
                f"is more stages than the model's {len(layers)} layers",
                f"use at most {len(layers)}",
            )
        )
    costs = [layer.cost for layer in layers]
    placed = place_layers([layer.name for layer in layers], plan)
    splits = _splits(layers, plan)
    first = next(iter(find_towers(layers).values())) if splits else 0
    halves = [_halves(costs, first, split, plan.num_stages, placed) for split in splits]
    if any(halves):
        return min(filter(None, halves), key=lambda counts: _dearest_first(costs, counts))
    if plan.split is not None:
        problem = f"plan.place={dict(plan.place)} puts a block of the other tower on its side"
        raise Refused(Fault("plan.split", plan.split, problem, "leave one of the two out"))
    return balance(costs, plan.num_stages, placed)


def _halves(costs: list[float], first: int, split: int, stages: int, placed: Mapping[int, int]) -> list[int]:
    """Counts for two towers, the first of so many layers on the stages before `split`; empty where places forbid it."""
    before = {i: stage for i, stage in placed.items() if i < first}
    behind = {i - first: stage - split for i, stage in placed.items() if i >= first}
    one, two = balance(costs[:first], split, before), balance(costs[first:], stages - split, behind)
    return one + two if one and two else []


def _dearest_first(costs: list[float], counts: list[int]) -> list[float]:
    ends = list(itertools.accumulate(counts))
    return sorted((sum(costs[end - count : end]) for end, count in zip(ends, counts, strict=True)), reverse=True)


def _splits(layers: list[Layer], plan: Plan) -> Sequence[int]:
    """The stages at which the second of two towers may start; empty to cut all layers as one chain.

    By itself only a tower with an input of its own is kept apart. Refused where plan.split cannot be.
    """
    towers, split = find_towers(layers), plan.split
    if split is None and (len(towers) != 2 or plan.num_stages == 1 or not starts_anew(layers)):
        return ()
    if len(towers) != 2:
        named = ", ".join(towers) or "none"
        problem = f"a split needs a model of two towers of blocks, an encoder and a decoder; this one has {named}"
        raise Refused(Fault("plan.split", split, problem, "use plan.split=null"))
    (before, first), (behind, second) = towers.items()
    least, most = max(1, plan.num_stages - second), min(first, plan.num_stages - 1)
    if split is None:
        return range(least, most + 1)
    if not least <= split <= most:
        problem = f"{first} blocks of {before} on {split} stages and {second} of {behind} on {plan.num_stages - split}"
        fix = f"use plan.split={least}" + (f" to {most}" if most > least else "") + ", or null"
        raise Refused(Fault("plan.split", split, f"{problem} leaves a stage without one", fix))
    return (split,)


NONE: tuple[float, float, tuple[int, ...]] = (float("inf"), float("inf"), ())


def balance(costs: list[float], num_stages: int, placed: Mapping[int, int] | None = None) -> list[int]:
    """Consecutive counts, each at least 1, that make the dearest stage as cheap as can be, then the others alike.

    placed: layers whose stage is given. Empty where no counts can be.
    """
    home = placed or {}
    total = [0.0]
    for value in costs:
        total.append(total[-1] + value)

    @cache
    def best(stages: int, end: int) -> tuple[float, float, tuple[int, ...]]:
        if stages == 1:
            fits = all(home.get(i, 0) == 0 for i in range(end))
            return (total[end], total[end] ** 2, (end,)) if fits and end else NONE
        options = [NONE]
        for start in range(end - 1, stages - 2, -1):
            if home.get(start, stages - 1) != stages - 1:
                break
            most, squares, counts = best(stages - 1, start)
            own = total[end] - total[start]
            options.append((max(most, own), squares + own**2, (*counts, end - start)))
        return min(options)

    return list(best(num_stages, len(costs))[2])


def _even(num_layers: int, num_stages: int) -> list[int]:
    small, more = divmod(num_layers, num_stages)
    return [small + (i < more) for i in range(num_stages)]


def _stage(graph: fx.Graph, groups: list[list[Layer]], index: int) -> Stage:
    home = {node: i for i, group in enumerate(groups) for layer in group for node in layer.nodes}
    home |= {node: home[operand(node, 0)] for node in home if node.target is operator.getitem}  # only tensors are sent
    received = _crossing(home, index)
    sent = _crossing(home, index + 1)
    last = index == len(groups) - 1
    output = next(n for n in reversed(graph.nodes) if n.op == "output")
    wanted = list(output.all_input_nodes) if last else sent

    needed = upstream(wanted, received)
    new, env = fx.Graph(), {}
    for i, node in enumerate(received):
        env[node] = new.placeholder(f"received_{i}")
        env[node].meta = dict(node.meta)
    for node in graph.nodes:
        if node in needed and node.op == "placeholder":
            env[node] = new.placeholder(node.target)
            env[node].meta = dict(node.meta)
    for node in graph.nodes:
        if node in needed and node.op != "placeholder":
            env[node] = new.node_copy(node, env.__getitem__)
    not_across(new, {f"stage {index}": [env[n] for n in needed if n.op != "placeholder"]})  # what is received is a leaf
    new.output(env[wanted[0]] if len(wanted) == 1 else tuple(env[n] for n in wanted))
    return Stage(
        index,
        new,
        tuple(map(_example, received)),
        tuple(map(_example, sent)),
        tuple(n.target for n in graph.nodes if n in needed and n.op == "placeholder"),
        tuple(n.target for n in graph.nodes if n in needed and n.op == "get_attr" and n.target not in BOUND),
        tuple(layer.name for layer in groups[index] if layer.name is not None),
        sum(layer.cost for layer in groups[index]),
    )


def _crossing(home: dict[fx.Node, int], stage: int) -> list[fx.Node]:
    """The activations made before a stage that it or a later one reads."""
    return [n for n, i in home.items() if i < stage and any(home.get(u, -1) >= stage for u in n.users)]


def _example(node: fx.Node) -> torch.Tensor:
    return torch.empty_like(node.meta["val"], device="meta").requires_grad_(bool(node.meta["grad"]))
