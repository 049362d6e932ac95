"""What is measured: each function builds one way to train the plain model and returns its step.

A step takes a batch {input_ids, labels} [rows, T], moves the weights once and returns the mean loss, or None on a rank
that does not know it. All take the same optimizer step from the same weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import meg_compile
from benchmarks import by_hand
from benchmarks.model import Size, batch, build
from meg_compile import Plan
from meg_compile.runtime.executor import Executor
from meg_compile.runtime.groups import init_groups

Step = Callable[[dict[str, Tensor]], float | None]
CPU = torch.device("cpu")


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW, fused; DTensors in a group of their own, since a kernel takes no mixture."""
    groups: dict[bool, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(isinstance(parameter, DTensor), []).append(parameter)
    return torch.optim.AdamW([{"params": group} for group in groups.values()], lr=1e-4, fused=True)


def compiled(size: Size, plan: Plan, rows: int) -> tuple[Step, meg_compile.Program]:
    """The compiled program; `rows` in a micro-batch."""
    program = meg_compile.compile(build(size), batch(size, rows, 0), plan)
    executor = Executor(program, init_groups(plan.mesh, "cpu"), CPU)
    executor.load()
    optim = optimizer(executor.parameters.values())
    knows_loss = plan.num_stages - 1 in program.stage_of_rank(executor.groups.coords.pp)

    def step(batch: dict[str, Tensor]) -> float | None:
        loss = executor.run(batch, 1 / batch["labels"].numel())
        executor.reduce_gradients()
        optim.step()
        optim.zero_grad()
        return loss if knows_loss else None

    return step, program


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def eager(size: Size) -> Step:
    """The plain module."""
    return _whole_batch(build(size), cross_entropy)


def tensor_by_hand(size: Size) -> Step:
    return _whole_batch(by_hand.tensor_parallel(build(size)), by_hand.loss)


def after_forward(size: Size, step: Step) -> Step:
    """`step`, after one more forward pass of the plain module, which keeps nothing."""
    model = build(size)

    def forward_and_step(batch: dict[str, Tensor]) -> float | None:
        with torch.no_grad():
            cross_entropy(model(batch["input_ids"]), batch["labels"])
        return step(batch)

    return forward_and_step


def _whole_batch(model: nn.Module, loss_of: Callable[[Tensor, Tensor], Tensor]) -> Step:
    optim = optimizer(model.parameters())

    def step(batch: dict[str, Tensor]) -> float:
        loss = loss_of(model(batch["input_ids"]), batch["labels"])
        loss.backward()
        optim.step()
        optim.zero_grad()
        return loss.item()

    return step


def tensor_by_dtensor(size: Size, sp: bool = False) -> Step:
    """`parallelize_module` with one f for q, k and v, vocabulary-parallel embedding and head, and `loss_parallel`.

    sp: the sequence is sharded from the embedding, which reduce-scatters, to the head, norms included.
    """
    between = Shard(1) if sp else Replicate()
    gathered = PrepareModuleInput(input_layouts=between, desired_input_layouts=Replicate())
    block = {
        "attn": gathered,
        "mlp": gathered,
        **{name: ColwiseParallel() for name in ("attn.q", "attn.k", "attn.v", "mlp.up")},
        **{name: RowwiseParallel(output_layouts=between) for name in ("attn.o", "mlp.down")},
        **({name: SequenceParallel(use_local_output=True) for name in ("attn_norm", "mlp_norm")} if sp else {}),
    }
    plan = {f"blocks.{i}.{name}": style for i in range(size.layers) for name, style in block.items()}
    plan["embedding.tokens"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
    plan["head"] = ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False)
    if sp:
        plan["embedding.positions"] = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(0))
        plan["norm"] = SequenceParallel(use_local_output=True)
    model = parallelize_module(build(size), init_device_mesh("cpu", (torch.distributed.get_world_size(),)), plan)
    optim = optimizer(model.parameters())

    def step(batch: dict[str, Tensor]) -> float:
        with loss_parallel():
            loss = cross_entropy(model(batch["input_ids"]), batch["labels"])
            loss.backward()
        optim.step()
        optim.zero_grad()
        return (loss.full_tensor() if isinstance(loss, DTensor) else loss).item()

    return step


def pipeline_by_hand(size: Size, rows: int, num_micro_batches: int, cut: Sequence[int]) -> Step:
    """torch's 1F1B over stages split by hand, with `cut` blocks each, on two ranks: interleaved where there are more
    stages than ranks."""
    model, rank, ranks = build(size), torch.distributed.get_rank(), torch.distributed.get_world_size()
    ends, last = list(accumulate(cut)), len(cut) - 1
    hidden = torch.empty(rows, size.seq, size.hidden, device="meta").requires_grad_()
    tokens = torch.empty(rows, size.seq, dtype=torch.int64, device="meta")
    logits = torch.empty(rows, size.seq, size.vocab, device="meta").requires_grad_()

    def stage(index: int) -> PipelineStage:
        before = [model.embedding] if index == 0 else []
        after = [model.norm, model.head] if index == last else []
        parts = [*before, *model.blocks[ends[index] - cut[index] : ends[index]], *after]
        return PipelineStage(
            nn.Sequential(*parts),
            index,
            len(cut),
            CPU,
            input_args=tokens if before else hidden,
            output_args=logits if after else hidden,
        )

    stages = [stage(index) for index in range(rank, len(cut), ranks)]
    optim = optimizer(parameter for stage in stages for parameter in stage.submod.parameters())

    def share(logits: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(logits, labels) / num_micro_batches

    if len(cut) == ranks:
        schedule = Schedule1F1B(stages[0], num_micro_batches, share, scale_grads=False)
    else:
        schedule = ScheduleInterleaved1F1B(stages, num_micro_batches, share, scale_grads=False)
    reads, knows_loss = rank == 0, rank == last % ranks

    def step(batch: dict[str, Tensor]) -> float | None:
        losses: list[Tensor] = []
        inputs = (batch["input_ids"],) if reads else ()
        target = {"target": batch["labels"], "losses": losses} if knows_loss else {}
        schedule.step(*inputs, **target, return_outputs=False)
        optim.step()
        optim.zero_grad()
        return torch.stack(losses).sum().item() if knows_loss else None

    return step
