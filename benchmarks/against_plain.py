"""A small model under a plan against the plain model, in float64, ranks as threads of this process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Protocol
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.composed import configuration
from benchmarks.threads import run_threads
from benchmarks.wide import widened
from meg_compile.compiler import compile
from meg_compile.config import Config
from meg_compile.plan import Plan
from meg_compile.runtime.executor import Executor
from meg_compile.runtime.groups import init_groups
from meg_compile.verify import Report, verify

SEED, STEPS, ROWS = 1234, 2, 4
NOISE = 0.2  # added to every parameter, so that a bias or norm that is read twice cannot hide behind 0 or 1


class Entry(Protocol):
    """A model to compare: `build` makes it; `batch(step)` is a global batch of ROWS rows, as its forward takes them."""

    @property
    def loss(self) -> Callable[..., Tensor] | None: ...

    def build(self) -> nn.Module: ...

    def batch(self, step: int) -> dict[str, Tensor]: ...


class Rows:
    """The batches of an entry as a dataset of rows."""

    def __init__(self, entry: Entry):
        batches = [entry.batch(step) for step in range(STEPS)]
        self.rows = [{name: values[i] for name, values in batch.items()} for batch in batches for i in range(ROWS)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return self.rows[i]


class Trial:
    """A model compiled for a plan, to be compared with the plain one. MegError where it cannot be."""

    def __init__(self, entry: Entry, plan: Plan, micro_batch_size: int = 1):
        self.entry, self.plan, self.config = entry, plan, _config(micro_batch_size)
        self.rows = Rows(entry)
        inputs = {name: values[:micro_batch_size] for name, values in entry.batch(0).items()}
        torch.manual_seed(SEED)
        self.program = compile(self.factory, inputs, plan, entry.loss, torch.float64)

    def factory(self) -> nn.Module:
        model = self.entry.build()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * NOISE)
        return widened(model)

    def run(self) -> Report:
        """Two steps of SGD under the plan and plainly: loss, norm, every gradient and every weight."""
        with patch("meg_compile.train.batches.seeded_reads", lambda: nullcontext(lambda *_: None)):
            return run_threads(self.plan.mesh.size, self._rank)[0]

    def _rank(self, _: int) -> Report:
        groups = init_groups(self.plan.mesh, "cpu")
        executor = Executor(self.program, groups, torch.device("cpu"))
        dist.barrier()  # the threads share torch's generator, which each seeds to load its weights
        executor.load()
        dist.barrier()
        given = self.factory, self.entry.loss, self.rows
        return verify(self.config, self.program, executor, groups, *given, steps=STEPS)


def largest_error(report: Report) -> float:
    """Of anything that was compared, relative to the largest entry of its tensor."""
    return max(difference.error for difference in report.differences)


@cache
def _config(micro_batch_size: int) -> Config:
    sizes = f"train.micro_batch_size={micro_batch_size}", f"train.global_batch_size={ROWS}", f"train.steps={STEPS}"
    settings = "plan=single", "precision=fp64", "optim=sgd", "optim.lr=0.05", "data.shuffle=false", "train.clip_grad=0"
    return configuration(*settings, f"train.seed={SEED}", *sizes)
