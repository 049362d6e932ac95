"""The order in which each pipeline rank runs its actions, read off torch.distributed.pipelining's own schedules."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from meg_compile.schedules import SCHEDULES

CLASSES: dict[str, type[Any]] = {
    "1f1b": pipelining.Schedule1F1B,
    "gpipe": pipelining.ScheduleGPipe,
    "looped_bfs": pipelining.ScheduleLoopedBFS,
    "interleaved_1f1b": pipelining.ScheduleInterleaved1F1B,
    "interleaved_zero_bubble": pipelining.ScheduleInterleavedZeroBubble,
    "zbv_zero_bubble": pipelining.ScheduleZBVZeroBubble,
    "dualpipev": pipelining.ScheduleDualPipeV,
}


@dataclass(frozen=True)
class Action:
    """What a rank computes at a time.

    kind: "F" forward, "B" backward, or backward in two parts: "I" for the gradient of the stage's inputs and "W" for
          that of its weights.
    with_next: the next action belongs to this one (DualPipeV): what either makes is sent after both.
    """

    kind: str
    stage: int
    micro_batch: int
    with_next: bool = False


@dataclass
class _StandIn:
    """What a schedule asks of a stage before it runs."""

    num_stages: int
    group_size: int
    stage_index: int
    submod: None = None
    group_rank: int = 0
    has_backward: bool = True
    is_last: bool = False
    stage_index_to_group_rank: dict[int, int] = field(default_factory=dict)


def make(name: str, stages: list[Any], num_micro_batches: int, loss_fn: Any, backward: bool = True) -> Any:
    """torch's schedule over the stages of one rank. Its gradients are those of the sum of the losses.

    backward: False for one that only runs forward; torch's own would hand on gradients that are not there.
    """
    kind = CLASSES[name]
    one = issubclass(kind, PipelineScheduleSingle)
    schedule: Any = kind(stages[0] if one else stages, num_micro_batches, loss_fn=loss_fn, scale_grads=False)
    if not backward:
        schedule._has_backward = False  # what eval() sets too; it would then concatenate the losses, which are scalars
    if not (backward or one):
        for rank, actions in schedule.pipeline_order_with_comms.items():
            parts = [part for action in actions for part in action.sub_actions or (action,)]
            schedule.pipeline_order_with_comms[rank] = [p for p in parts if p.computation_type.name in _FORWARD]
    return schedule


@cache
def orders(name: str, pp: int, vpp: int, num_micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """For each pipeline rank its actions in order, without pauses. ValueError for a number that it does not allow."""
    mine = SCHEDULES[name].stages_of(0, pp, vpp)
    stages = [_StandIn(pp * vpp, pp, stage) for stage in mine]
    table = make(name, stages, num_micro_batches, None).pipeline_order
    if name == "1f1b":  # what torch runs; the table that it keeps beside is wrong for the last rank
        return tuple(_one_f_one_b(rank, pp, num_micro_batches) for rank in range(pp))
    return tuple(tuple(a for action in table[rank] for a in _read(action)) for rank in range(pp))


def _one_f_one_b(rank: int, pp: int, num_micro_batches: int) -> tuple[Action, ...]:
    ahead = pp - 1 - rank
    found = []
    for i in range(num_micro_batches + ahead):
        found += [Action("F", rank, i)] if i < num_micro_batches else []
        found += [Action("B", rank, i - ahead)] if i >= ahead else []
    return tuple(found)


_FORWARD = ("FORWARD", "SEND_F", "RECV_F")
_KINDS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}


def _read(action: Any) -> list[Action]:
    """torch's action as ours: a pair as two, an idle step or one that computes nothing as none."""
    if action is None:
        return []
    parts = [p for p in action.sub_actions or (action,) if p.computation_type.name in _KINDS]
    return [
        Action(_KINDS[p.computation_type.name], p.stage_index, p.microbatch_index, with_next=p is not parts[-1])
        for p in parts
    ]
