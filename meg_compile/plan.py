"""The parallel plan: how many ranks share each mesh dim, and how the stages take turns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from meg_compile.errors import Fault, Refused, nearest
from meg_compile.mesh import Mesh

SCHEDULES = ("1f1b", "gpipe", "interleaved_1f1b")


class PlanFields(Protocol):
    """What `plan_faults` reads: a `Plan`, or a section of the configuration."""

    tp: int
    pp: int
    vpp: int
    dp: int
    cp: int
    sp: bool
    schedule: str
    stages: tuple[int, ...] | list[int] | None


@dataclass(frozen=True)
class Plan:
    """A parallel plan. Sizes that cannot work are `Refused` as soon as it is made.

    tp        ranks that share every layer (tensor parallel)
    pp        pipeline ranks, each with `vpp` stages
    vpp       stages (chunks) per pipeline rank; more than 1 needs schedule="interleaved_1f1b"
    dp        replicas that read different rows (data parallel)
    cp        ranks that share a sequence (context parallel); only 1
    sp        split the sequence over the tp ranks between layers (sequence parallel); only False
    schedule  one of `SCHEDULES`
    stages    blocks per stage in order, pp*vpp numbers; None lets the compiler balance them
    strict    refuse a model with an axis that tp does not divide, rather than keep those layers whole
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    dp: int = 1
    cp: int = 1
    sp: bool = False
    schedule: str = "1f1b"
    stages: tuple[int, ...] | None = None
    strict: bool = True

    def __post_init__(self) -> None:
        if faults := plan_faults(self):
            raise Refused(faults)

    @property
    def mesh(self) -> Mesh:
        """The ranks of this plan."""
        return Mesh(tp=self.tp, cp=self.cp, dp=self.dp, pp=self.pp)

    @property
    def num_stages(self) -> int:
        """Pipeline stages in all: pp ranks with vpp each."""
        return self.pp * self.vpp


def plan_faults(plan: PlanFields) -> list[Fault]:
    """Everything about a plan that cannot work whatever the model is, keyed as in the configuration."""
    sizes = {name: getattr(plan, name) for name in ("tp", "pp", "vpp", "dp", "cp")}
    faults = [
        Fault(f"plan.{name}", size, "a size counts ranks, so it is at least 1", f"use plan.{name}=1 for none")
        for name, size in sizes.items()
        if size < 1
    ]
    if plan.cp > 1:
        faults.append(Fault("plan.cp", plan.cp, "context parallelism is not available", "use plan.cp=1"))
    if plan.schedule not in SCHEDULES:
        guess = nearest(plan.schedule, SCHEDULES)
        hint = f"did you mean {guess}? There are {', '.join(SCHEDULES)}" if guess else f"use one of {', '.join(SCHEDULES)}"
        faults.append(Fault("plan.schedule", plan.schedule, "no such schedule", hint))
    elif plan.vpp > 1 and plan.schedule != "interleaved_1f1b":
        faults.append(
            Fault(
                "plan.vpp",
                plan.vpp,
                f"plan.schedule={plan.schedule} runs one stage per rank",
                "use plan.schedule=interleaved_1f1b, or plan.vpp=1",
            )
        )
    if plan.vpp > 1 and plan.pp == 1:
        faults.append(
            Fault("plan.vpp", plan.vpp, "only a pipeline has stages to interleave", "use plan.vpp=1, or plan.pp=2 or more")
        )
    return faults + _stages_faults(plan)


def _stages_faults(plan: PlanFields) -> list[Fault]:
    if plan.stages is None:
        return []
    shown = "[" + ",".join(map(str, plan.stages)) + "]"
    faults = []
    num_stages = plan.pp * plan.vpp
    if min(plan.pp, plan.vpp) >= 1 and len(plan.stages) != num_stages:
        fix = f"give {num_stages} numbers, or plan.stages=null for a balanced cut"
        faults.append(
            Fault("plan.stages", shown, f"{len(plan.stages)} stages for pp={plan.pp} x vpp={plan.vpp} = {num_stages}", fix)
        )
    if any(blocks < 0 for blocks in plan.stages):
        faults.append(Fault("plan.stages", shown, "a stage cannot have less than 0 blocks", "use counts of blocks"))
    return faults
