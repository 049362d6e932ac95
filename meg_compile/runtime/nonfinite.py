"""Where a number that is none (inf, nan) came from: the first of all ranks to see one says so, and all agree."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meg_compile.passes.partition import Stage
from meg_compile.runtime.executor import Executor
from meg_compile.runtime.recompute import Recomputed
from meg_compile.runtime.schedule import Batch
from meg_compile.runtime.stage import StageModule

PARTS = 2**20  # more than a stage has parts or a graph has nodes
NEVER = torch.iinfo(torch.int64).max

Found = tuple[int, str] | None
"""What this rank saw first: (when, smaller is earlier, the same measure on all ranks; where, in words)."""


def in_forward(executor: Executor, batch: Batch) -> str:
    """Run a replica's rows once more and watch what leaves each block. A collective; the same on every rank.

    "" where all is finite this time (a random mask made the difference). Gradients are left behind.
    """
    watches = [_Watch(executor, module, stage) for module, stage in zip(executor.modules, executor.stages, strict=True)]
    try:
        executor.run(batch, 1.0)
    finally:
        for watch in watches:
            watch.remove()
    return _earliest(min((watch.found for watch in watches if watch.found), default=None), executor.device)


def in_gradients(executor: Executor) -> str:
    """The parameter nearest to the loss whose gradient is not finite. A collective; the same on every rank."""
    found: list[tuple[int, str]] = []
    for stage in executor.stages:
        for place, node in enumerate(stage.graph.nodes):
            for name in (str(n.target) for n in node.all_input_nodes if n.op == "get_attr"):
                parameter = executor.parameters.get(name)
                if parameter is None or parameter.grad is None or parameter.grad.isfinite().all():
                    continue
                when = (executor.program.plan.num_stages - stage.index) * PARTS - place
                found.append((when, f"{_stage(executor, stage)}, the gradient of {name}"))
    return _earliest(min(found, default=None), executor.device)


class _Watch:
    """Notes the first value that is not finite in a stage, by micro-batch, then along the forward pass."""

    def __init__(self, executor: Executor, module: StageModule, stage: Stage):
        self.executor, self.stage = executor, stage
        self.micro_batch, self.found = -1, None
        names = [_layer(block) for block in module.blocks]
        self.hooks = [module.register_forward_pre_hook(self._begin)]
        for i, (name, block) in enumerate(zip(names, module.blocks, strict=True)):
            self.hooks.append(block.register_forward_pre_hook(partial(self._see, 2 * i, f"before {name}")))
            self.hooks.append(block.register_forward_hook(partial(self._see, 2 * i + 1, name)))
        after = f"after {names[-1]}" if names else "its output"
        self.hooks.append(module.register_forward_hook(partial(self._see, 2 * len(names), after)))

    def remove(self) -> None:
        for hook in self.hooks:
            hook.remove()

    def _begin(self, *_: Any) -> None:
        self.micro_batch += 1

    def _see(self, place: int, part: str, _: nn.Module, *seen: Any) -> None:
        """seen: what went in, and maybe what came out. A mask, which needs no gradient, may hold -inf."""
        values = seen[-1] if isinstance(seen[-1], tuple) else (seen[-1],)
        if self.found or all(v.isfinite().all() for v in values if isinstance(v, Tensor) and v.requires_grad):
            return
        when = (self.micro_batch * self.executor.program.plan.num_stages + self.stage.index) * PARTS + place
        rows = f"micro-batch {self.micro_batch} of replica {self.executor.groups.coords.dp}"
        self.found = when, f"{_stage(self.executor, self.stage)}, {part}, {rows}"


def _stage(executor: Executor, stage: Stage) -> str:
    return f"stage {stage.index} (pipeline rank {executor.program.pp_rank_of(stage.index)})"


def _layer(block: nn.Module) -> str:
    inner: Any = block.body if isinstance(block, Recomputed) else block
    computed = (n for n in reversed(inner.graph.nodes) if n.op == "call_function" and n.meta.get("layer"))
    return next((str(n.meta["layer"]) for n in computed), "a block")


def _earliest(found: Found, device: torch.device) -> str:
    """The words of the rank that saw it first; of several, the lowest rank."""
    text = [found[1] if found else ""]
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return text[0]
    whens = torch.tensor([found[0] if found else NEVER], device=device)
    every = [torch.empty_like(whens) for _ in range(dist.get_world_size())]
    dist.all_gather(every, whens)
    first = min(range(len(every)), key=lambda rank: every[rank].item())
    dist.broadcast_object_list(text, first, device=device)
    return text[0]
