"""Losses, norms, every gradient and every weight of the compiled program against the plain model, dropout included.

Allowed is what `task=verify` allows (meg_compile/verify/compare.py), relative to a tensor's largest number: in fp32
1e-4, some tens of roundings of 6e-8 with room for another order of sums, TF32 being off; in bf16 0.2, since
torch.compile keeps in fp32 what eager operators round to 4e-3 at every activation: gradients were seen to differ by
0.04. A wrong gradient is off by about 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.composed import configuration
from benchmarks.gpu.case import SETTINGS, Case
from meg_compile.models.loss import cross_entropy
from meg_compile.runtime.executor import Executor
from meg_compile.runtime.groups import Groups
from meg_compile.train.batches import DTYPES
from meg_compile.verify.compare import verify

STEPS = 3
SEED = 1234


class Rows:
    """As many rows as the steps read."""

    def __init__(self, case: Case):
        self.batch = case.but(rows=case.rows * STEPS).batch()

    def __len__(self) -> int:
        return len(self.batch["labels"])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {field: rows[index] for field, rows in self.batch.items()}


def equality(case: Case, groups: Groups, device: torch.device) -> list[dict[str, Any]]:
    """One row for each precision, eager and compiled; two micro-batches a step."""
    torch.set_float32_matmul_precision("highest")  # no TF32
    return [
        _compare(case, precision, compiled, groups, device)
        for precision in ("fp32", "bf16")
        for compiled in (False, True)
    ]


def _compare(case: Case, precision: str, compiled: bool, groups: Groups, device: torch.device) -> dict[str, Any]:
    micro = case.rows // 2
    sizes = f"train.micro_batch_size={micro}", f"train.global_batch_size={case.rows}", f"train.steps={STEPS}"
    config = configuration(*SETTINGS, f"precision={precision}", f"train.seed={SEED}", *sizes)
    program = case.compile(DTYPES[precision], micro, SEED)
    executor = Executor(program, groups, device, compiled=compiled)
    executor.load()
    report = verify(config, program, executor, groups, case.build, cross_entropy, Rows(case), steps=STEPS)
    if not report.ok:
        report.show()
    return {"precision": precision, "compiled": compiled, "ok": report.ok} | report.to_dict()
