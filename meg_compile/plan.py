"""The parallel plan: how many ranks share each mesh dim, and how the stages take turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meg_compile.errors import Fault, Refused, nearest
from meg_compile.mesh import Mesh

SCHEDULES = ("1f1b", "gpipe", "interleaved_1f1b")
ZERO = (0, 1, 2, 3)
RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True)
class Plan:
    """A parallel plan. Sizes that cannot work are `Refused` as soon as it is made.

    tp        ranks that share every layer (tensor parallel)
    pp        pipeline ranks, each with `vpp` stages
    vpp       stages (chunks) per pipeline rank; more than 1 needs schedule="interleaved_1f1b"
    dp        replicas that read different rows (data parallel)
    cp        ranks that share a sequence (context parallel); only 1
    sp        shard the sequence over the tp ranks between g and f (sequence parallel)
    schedule  one of `SCHEDULES`
    zero      what replicas share of the model's states: 1 optimizer states, 2 and gradients, 3 and parameters
    stages    blocks per stage in order, pp*vpp numbers; None lets the compiler balance them
    recompute what backward computes again instead of keeping it: one of `RECOMPUTE`; "selective" is the attention core
    recompute_every  of a stage's blocks, recompute each n-th
    strict    refuse a model with an axis that tp does not divide, rather than keep those layers whole
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    dp: int = 1
    cp: int = 1
    sp: bool = False
    zero: int = 0
    schedule: str = "1f1b"
    stages: tuple[int, ...] | None = None
    recompute: str = "none"
    recompute_every: int = 1
    strict: bool = True

    def __post_init__(self) -> None:
        if faults := plan_faults(**vars(self)):
            raise Refused(faults)

    @property
    def mesh(self) -> Mesh:
        """The ranks of this plan."""
        return Mesh(tp=self.tp, cp=self.cp, dp=self.dp, pp=self.pp)

    @property
    def num_stages(self) -> int:
        """Pipeline stages in all: pp ranks with vpp each."""
        return self.pp * self.vpp


def plan_faults(
    *,
    tp: int,
    pp: int,
    vpp: int,
    dp: int,
    cp: int,
    sp: bool,
    zero: int,
    schedule: str,
    stages: Sequence[int] | None,
    recompute: str,
    recompute_every: int,
    strict: bool,
) -> list[Fault]:
    """Everything about the fields of a `Plan` that cannot work whatever the model is, keyed as in the configuration."""
    sizes = {"tp": tp, "pp": pp, "vpp": vpp, "dp": dp, "cp": cp}
    faults = [
        Fault(f"plan.{name}", size, "a size counts ranks, so it is at least 1", f"use plan.{name}=1 for none")
        for name, size in sizes.items()
        if size < 1
    ]
    if cp > 1:
        faults.append(Fault("plan.cp", cp, "context parallelism is not available", "use plan.cp=1"))
    if zero not in ZERO:
        fix = "use plan.zero=0 for none, 1 for optimizer states, 2 for gradients too, or 3 for parameters too"
        faults.append(Fault("plan.zero", zero, "no such way to shard over replicas", fix))
    if schedule not in SCHEDULES:
        guess = nearest(schedule, SCHEDULES)
        hint = (f"did you mean {guess}? " if guess else "") + f"There are {', '.join(SCHEDULES)}"
        faults.append(Fault("plan.schedule", schedule, "no such schedule", hint))
    elif vpp > 1 and schedule != "interleaved_1f1b":
        problem = f"plan.schedule={schedule} runs one stage per rank"
        faults.append(Fault("plan.vpp", vpp, problem, "use plan.schedule=interleaved_1f1b, or plan.vpp=1"))
    if recompute not in RECOMPUTE:
        guess = nearest(recompute, RECOMPUTE)
        hint = (f"did you mean {guess}? " if guess else "") + f"There are {', '.join(RECOMPUTE)}"
        faults.append(Fault("plan.recompute", recompute, "no such way to recompute", hint))
    if recompute_every < 1:
        problem = "counts blocks, so it is at least 1"
        faults.append(Fault("plan.recompute_every", recompute_every, problem, "use plan.recompute_every=1 for all"))
    if vpp > 1 and pp == 1:
        problem = "only a pipeline has stages to interleave"
        faults.append(Fault("plan.vpp", vpp, problem, "use plan.vpp=1, or plan.pp=2 or more"))
    return faults + ([] if stages is None else _stages_faults(pp, vpp, stages))


def _stages_faults(pp: int, vpp: int, stages: Sequence[int]) -> list[Fault]:
    shown = "[" + ",".join(map(str, stages)) + "]"
    faults = []
    if min(pp, vpp) >= 1 and len(stages) != pp * vpp:
        problem = f"{len(stages)} stages for pp={pp} x vpp={vpp} = {pp * vpp}"
        fix = f"give {pp * vpp} numbers, or plan.stages=null for a balanced cut"
        faults.append(Fault("plan.stages", shown, problem, fix))
    if any(blocks < 0 for blocks in stages):
        faults.append(Fault("plan.stages", shown, "a stage cannot have less than 0 blocks", "use counts of blocks"))
    return faults
