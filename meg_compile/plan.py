"""The parallel plan: how many ranks share each mesh dim, and how the stages take turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from meg_compile.errors import Fault, Refused, any_of, nearest
from meg_compile.mesh import Mesh
from meg_compile.schedules import SCHEDULES
from meg_compile.stage_layout import BadLayout, read_layout

ZERO = (0, 1, 2, 3)
RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True)
class Plan:
    """A parallel plan. Sizes that cannot work are `Refused` as soon as it is made.

    tp        ranks that share every layer (tensor parallel)
    pp        pipeline ranks, each with `vpp` stages
    vpp       stages (chunks) per pipeline rank; the schedule says how many it runs
    dp        replicas that read different rows (data parallel)
    cp        ranks that share every sequence (context parallel)
    sp        shard the sequence over the tp ranks between g and f (sequence parallel)
    schedule  one of `SCHEDULES`
    zero      what replicas share of the model's states: 1 optimizer states, 2 and gradients, 3 and parameters
    stages    blocks per stage in order, pp*vpp numbers, or a layout in Megatron-LM's letters (`stage_layout`);
              None lets the compiler balance them
    split     of a model with two towers (encoder, decoder) the stage at which the second one starts; None finds the
              stage that makes the dearest one cheapest, where the second tower has an input of its own
    place     stages of single blocks by name or pattern, {"h.0": 0, "encoder.*": 1}; the rest is balanced around them
    keep      what stays whole on every tp rank: axes ("ffn"), parameters or modules ("h.0.mlp.*", "*.attn")
    shard     what must be sharded over tp, by the same patterns or one dim of them ("h.*.mlp.fc1.weight:0"); it wins
              where two axes compete in one tensor
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
    stages: tuple[int, ...] | str | None = None
    split: int | None = None
    place: Mapping[str, int] = field(default_factory=dict, hash=False)
    keep: tuple[str, ...] = ()
    shard: tuple[str, ...] = ()
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

    def __str__(self) -> str:
        """What it does, as settings: "tp=2 pp=2 sp zero=1 1f1b"."""
        said = [f"{name}={getattr(self, name)}" for name in ("tp", "cp", "dp", "pp", "vpp") if getattr(self, name) > 1]
        said += ["sp"] * (self.sp and self.tp > 1) + [f"zero={self.zero}"] * (self.zero > 0 and self.dp > 1)
        said += [f"{name}={','.join(getattr(self, name))}" for name in ("keep", "shard") if getattr(self, name)]
        said += [f"place={','.join(f'{name}:{stage}' for name, stage in self.place.items())}"] * bool(self.place)
        said += [self.schedule] * (self.pp > 1) + [f"recompute={self.recompute}"] * (self.recompute != "none")
        return " ".join(said) or "one rank"

    @property
    def num_stages(self) -> int:
        """Pipeline stages in all: pp ranks with vpp each."""
        return self.pp * self.vpp

    def stages_of(self, pp_rank: int) -> list[int]:
        """The stages that a pipeline rank runs, in order."""
        return SCHEDULES[self.schedule].stages_of(pp_rank, self.pp, self.vpp)

    def rank_of(self, stage: int) -> int:
        """The pipeline rank that runs a stage."""
        return SCHEDULES[self.schedule].rank_of(stage, self.pp)


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
    stages: Sequence[int] | str | None,
    split: int | None,
    place: Mapping[str, int],
    keep: Sequence[str],
    shard: Sequence[str],
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
    if zero not in ZERO:
        fix = "use plan.zero=0 for none, 1 for optimizer states, 2 for gradients too, or 3 for parameters too"
        faults.append(Fault("plan.zero", zero, "no such way to shard over replicas", fix))
    if schedule not in SCHEDULES:
        guess = nearest(schedule, SCHEDULES)
        hint = (f"did you mean {guess}? " if guess else "") + f"There are {', '.join(SCHEDULES)}"
        faults.append(Fault("plan.schedule", schedule, "no such schedule", hint))
    elif pp > 1 and SCHEDULES[schedule].vpp not in (None, vpp):
        wanted = SCHEDULES[schedule].vpp
        problem = f"plan.schedule={schedule} runs {'one stage' if wanted == 1 else f'{wanted} stages'} per rank"
        others = [s.name for s in SCHEDULES.values() if s.vpp in (None, vpp)]
        faults.append(Fault("plan.vpp", vpp, problem, f"use plan.vpp={wanted}, or plan.schedule={any_of(others)}"))
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
    faults += _pattern_faults(place, keep, shard, pp * vpp)
    if split is not None:
        faults += _split_faults(pp, vpp, stages, split)
    if isinstance(stages, str):
        return faults + _layout_faults(pp, vpp, stages)
    return faults + ([] if stages is None else _stages_faults(pp, vpp, stages))


def _pattern_faults(place: Mapping[str, int], keep: Sequence[str], shard: Sequence[str], stages: int) -> list[Fault]:
    faults = []
    for key, pattern in [*(("plan.keep", p) for p in keep), *(("plan.shard", p) for p in shard)]:
        path, colon, dim = pattern.partition(":")
        if not path or (colon and not dim.isdecimal()):
            problem = "a pattern is a name, or a name with a dim behind a colon"
            faults.append(Fault(key, pattern, problem, "write it as h.*.mlp.fc1.weight:0, say"))
        elif key == "plan.shard" and pattern in keep:
            faults.append(Fault(key, pattern, f"plan.keep={pattern} keeps it whole", "leave one of the two out"))
    for pattern, stage in place.items():
        if not 0 <= stage < max(stages, 1):
            problem = f"there is no stage {stage} of {stages}" + ", counted from 0" * (stages > 1)
            fix = f"use 0 to {stages - 1}" if stages > 1 else "use 0, or plan.pp=2 or more"
            faults.append(Fault(f"plan.place.{pattern}", stage, problem, fix))
    return faults


def _split_faults(pp: int, vpp: int, stages: Sequence[int] | str | None, split: int) -> list[Fault]:
    if stages is not None:
        problem = "plan.stages already says where every block lies"
        return [Fault("plan.split", split, problem, "leave one of the two out")]
    if 0 < split < pp * vpp:
        return []
    if pp * vpp < 2:
        return [Fault("plan.split", split, "only a pipeline has a stage to start at", "use plan.pp=2 or more")]
    problem = f"there are {pp * vpp} stages, from 0, and each tower needs one"
    fix = "use plan.split=1" + (f" to {pp * vpp - 1}" if pp * vpp > 2 else "")
    return [Fault("plan.split", split, problem, f"{fix}, or null")]


def _layout_faults(pp: int, vpp: int, layout: str) -> list[Fault]:
    try:
        num = len(read_layout(layout))
    except BadLayout as wrong:
        return [Fault("plan.stages", layout, wrong.problem, wrong.fix)]
    if min(pp, vpp) < 1 or num == pp * vpp:
        return []
    fix = f"write {pp * vpp} of them, with | between"
    if num % pp == 0:
        fix += f", or use plan.vpp={num // pp}"
    return [Fault("plan.stages", layout, f"{num} stages for pp={pp} x vpp={vpp} = {pp * vpp}", fix)]


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
