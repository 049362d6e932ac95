"""A step of the pipeline in time: what each rank runs when, drawn, and how long it has nothing to do.

The order of each rank is the one that torch runs. Nothing is measured: every action takes what its stage costs, a third
of it forward and two thirds backward, or a third for each part of it; sending takes no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meg_compile.orders import Action, orders
from meg_compile.schedules import SCHEDULES

if TYPE_CHECKING:
    from meg_compile.program import Program

PARTS = {"F": 1, "B": 2, "I": 1, "W": 1}  # thirds of a stage's cost
WIDTH, RANKS = 108, 16
"""Columns and ranks that are drawn."""


@dataclass(frozen=True)
class Span:
    """When a rank runs an action, in units of cost."""

    action: Action
    start: float
    end: float


def simulate(table: Sequence[Sequence[Action]], costs: Sequence[float]) -> list[list[Span]]:
    """When each rank runs its actions, in order and each as soon as it can.

    costs: of each stage, forward and backward.
    """
    spans: list[list[Span]] = [[] for _ in table]
    ready: dict[tuple[bool, int, int], float] = {}  # (whether backward, stage, micro-batch): when it is there
    progress = True
    while progress:
        progress = False
        for mine, actions in zip(spans, table, strict=True):
            while len(mine) < len(actions):
                together = _together(actions, len(mine))
                needs = [need for action in together for need in _needs(action, len(costs))]
                if not all(need in ready for need in needs):
                    break
                time = mine[-1].end if mine else 0.0
                for action in together:
                    start = max([time, *(ready[need] for need in _needs(action, len(costs)))])
                    time = start + costs[action.stage] * PARTS[action.kind] / 3
                    mine.append(Span(action, start, time))
                for action in (a for a in together if a.kind != "W"):
                    ready[action.kind != "F", action.stage, action.micro_batch] = time
                progress = True
    assert all(len(mine) == len(actions) for mine, actions in zip(spans, table, strict=True)), "a rank waits for ever"
    return spans


def idle(spans: list[list[Span]]) -> list[float]:
    """The share of a step in which each rank has nothing to do."""
    step = max(mine[-1].end for mine in spans) or 1.0
    return [1 - sum(span.end - span.start for span in mine) / step for mine in spans]


def bubble(spans: list[list[Span]]) -> float:
    """The share of all ranks' time in which they have nothing to do."""
    return sum(idle(spans)) / len(spans)


def figures(program: Program, num_micro_batches: int) -> dict[str, Any] | None:
    """The bubble as plain data; None where the schedule does not run so many micro-batches, or there is no pipeline."""
    plan = program.plan
    if plan.pp == 1 or not SCHEDULES[plan.schedule].allows(num_micro_batches, plan.pp):
        return None
    table = orders(plan.schedule, plan.pp, plan.vpp, num_micro_batches)
    spans = simulate(table, [stage.cost for stage in program.stages])
    equal = simulate(table, [1.0] * plan.num_stages)
    return {"bubble": bubble(spans), "bubble_of_equal_stages": bubble(equal), "idle_by_pp_rank": idle(spans)}


def timeline(program: Program, num_micro_batches: int) -> str:
    """The drawing with its figures."""
    plan = program.plan
    found = figures(program, num_micro_batches)
    if found is None:
        schedule = SCHEDULES[plan.schedule]
        works = " or ".join(map(str, schedule.near(num_micro_batches, plan.pp)))
        return f"  cannot run: it {schedule.why_not(num_micro_batches, plan.pp)}; {works} would do"
    equal = simulate(orders(plan.schedule, plan.pp, plan.vpp, num_micro_batches), [3.0] * plan.num_stages)
    shares = found["idle_by_pp_rank"]
    by_rank = ", ".join(f"{share:.1%}" for share in shares)
    shown = f"rank by rank {by_rank}" if len(shares) <= 8 else f"of a rank {min(shares):.1%} to {max(shares):.1%}"
    return "\n".join(
        [
            f"  bubble: {found['bubble']:.1%} of the ranks' time by the stages' costs ({shown});",
            f"  {found['bubble_of_equal_stages']:.1%} if all stages cost the same, as they are drawn.",
            f"  {_legend(plan.vpp, SCHEDULES[plan.schedule].splits)}",
            *draw(equal, plan.vpp),
        ]
    )


def draw(spans: list[list[Span]], vpp: int) -> list[str]:
    """A line for each rank, with as many columns for a unit of time as a name needs; what does not fit is cut off."""
    names = [[_name(span.action, mine, vpp) for span in mine] for mine in spans]
    unit = 1 + max(len(name) for row in names for name in row)
    step = max(mine[-1].end for mine in spans)
    columns = min(int(step) * unit, WIDTH // unit * unit)
    lines = []
    for rank, (mine, row) in enumerate(list(zip(spans, names, strict=True))[:RANKS]):
        line = ""
        for span, name in zip(mine, row, strict=True):
            line += "." * (round(span.start) * unit - len(line))
            line += name.ljust((round(span.end) - round(span.start)) * unit - 1, "-") + " "
        line = line.ljust(round(step) * unit, ".")[:columns].rstrip()
        lines.append(f"  pp rank {rank:<3}{line}")
    if columns < round(step) * unit:
        lines.append(f"  ... cut off after {columns // unit} of {round(step)} units of time")
    if len(spans) > RANKS:
        lines.append(f"  ... and {len(spans) - RANKS} more ranks")
    return lines


def _legend(vpp: int, splits: bool) -> str:
    backward = "I3 the part of backward for the inputs, W3 that for the weights, B3 both" if splits else "B3 backward"
    chunks = "; a, b, ... are the rank's stages" if vpp > 1 else ""
    return f"F3 is forward of micro-batch 3, {backward}{chunks}; dots are idle."


def _name(action: Action, mine: list[Span], vpp: int) -> str:
    if vpp == 1:
        return f"{action.kind}{action.micro_batch}"
    stages = sorted({span.action.stage for span in mine})
    return f"{action.kind}{action.micro_batch}{chr(ord('a') + stages.index(action.stage))}"


def _together(actions: Sequence[Action], at: int) -> list[Action]:
    """The action at a place, with those that belong to it."""
    end = at
    while actions[end].with_next:
        end += 1
    return list(actions[at : end + 1])


def _needs(action: Action, num_stages: int) -> list[tuple[bool, int, int]]:
    """What must be there before an action."""
    stage, micro = action.stage, action.micro_batch
    if action.kind == "F":
        return [(False, stage - 1, micro)] if stage else []
    if action.kind == "W":
        return [(True, stage, micro)]
    return [(False, stage, micro), *([(True, stage + 1, micro)] if stage < num_stages - 1 else [])]
