"""Run a rank's stages over micro-batches: directly where there is one stage, else by torch's pipeline schedules."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from meg_compile.orders import make
from meg_compile.passes.partition import Stage
from meg_compile.program import Program
from meg_compile.runtime.stage import StageModule

Batch = dict[str, torch.Tensor]
Run = Callable[[Batch, float, bool], float]
"""(a replica's rows, scale, backward) -> the sum of scale * loss over its micro-batches; 0.0 where the last stage is
elsewhere. With backward, gradients of that sum are left in the parameters."""


def one_stage(program: Program, module: StageModule) -> Run:
    def run(batch: Batch, scale: float, backward: bool) -> float:
        losses = []
        for fields in program.micro_batches(batch):
            with torch.set_grad_enabled(backward):
                loss = module(**fields) * scale
            if backward:
                loss.backward()
            losses.append(loss.detach())
        return float(torch.stack(losses).sum())

    return run


def pipeline(
    program: Program,
    modules: list[StageModule],
    stages: list[Stage],
    group: dist.ProcessGroup,
    device: torch.device,
    num_micro_batches: int,
    backward: bool,
) -> Run:
    """A pipeline schedule over this rank's stages, with shapes known beforehand, so that none are exchanged.

    It runs with backward or without, as it is made.
    """
    pipe_stages = [_pipe_stage(program, m, s, group, device) for m, s in zip(modules, stages, strict=True)]
    schedule = make(
        program.plan.schedule, pipe_stages, num_micro_batches, lambda loss, scale: loss * scale[0], backward
    )
    last = any(s.is_last for s in pipe_stages)

    def run(batch: Batch, scale: float, _: bool) -> float:
        losses: list[torch.Tensor] = []
        fields = {name: batch[name] for s in stages for name in s.fields}
        extra = {}
        if last:
            extra = {"target": torch.full((num_micro_batches,), scale, device=device, dtype=torch.float64)}
        with torch.set_grad_enabled(backward):
            schedule.step(**fields, **extra, losses=losses if last else None, return_outputs=False)
        return float(torch.stack(losses).detach().sum()) if last else 0.0

    return run


def _pipe_stage(
    program: Program, module: StageModule, stage: Stage, group: dist.ProcessGroup, device: torch.device
) -> PipelineStage:
    is_last = stage.index == program.plan.num_stages - 1
    return PipelineStage(
        module,
        stage.index,
        program.plan.num_stages,
        device,
        input_args=stage.received,
        output_args=(torch.empty((), device="meta"),) if is_last else stage.sent,
        group=group,
        dw_builder=module.later and module.later.take,
    )
