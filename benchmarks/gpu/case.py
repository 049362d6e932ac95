"""A GPT-2 on a device, compiled for one rank: weights, a batch, an optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import meg_compile
from benchmarks.composed import configuration
from meg_compile import Plan, Program
from meg_compile.models.gpt2 import GPT2
from meg_compile.runtime.executor import Executor
from meg_compile.runtime.groups import Groups

SETTINGS = ("plan=single", "optim=adamw", "optim.lr=1e-4", "optim.schedule=constant", "data.shuffle=false")
OPTIM = configuration(*SETTINGS).optim


@dataclass(frozen=True)
class Case:
    """`rows` of `seq` tokens in one micro-batch; vocab is a multiple of 128, as Megatron-LM pads it."""

    name: str
    layers: int
    hidden: int
    heads: int
    seq: int
    vocab: int
    rows: int
    dropout: float = 0.0
    recompute: str = "none"

    def build(self) -> GPT2:
        return GPT2(self.vocab, self.seq, self.layers, self.hidden, self.heads, self.dropout)

    def batch(self) -> dict[str, Tensor]:
        """input_ids and labels [rows, seq]."""
        tokens = torch.randint(self.vocab, (self.rows, self.seq + 1), generator=torch.Generator().manual_seed(1))
        return {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}

    def compile(self, dtype: torch.dtype, micro_batch_size: int | None = None, seed: int = 0) -> Program:
        example = {field: rows[:micro_batch_size] for field, rows in self.batch().items()}
        plan = Plan(recompute=self.recompute)
        torch.manual_seed(seed)
        return meg_compile.compile(self.build, example, plan, dtype=dtype)

    def but(self, **changes: Any) -> Case:
        return replace(self, **changes)


def rank(program: Program, groups: Groups, device: torch.device, compiled: bool) -> Executor:
    """With weights drawn on the device: the model's own, drawn on the CPU, would take most of a check's time."""
    executor = Executor(program, groups, device, compiled=compiled)
    draw_(executor.tensors.items())
    return executor


@torch.no_grad()
def draw_(tensors: Iterable[tuple[str, Tensor]]) -> None:
    for name, tensor in tensors:
        if tensor.dim() > 1:
            tensor.normal_(std=0.02)
        else:
            tensor.fill_(float("ln_" in name and name.endswith("weight")))
