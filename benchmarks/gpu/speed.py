"""Tokens per second and model FLOP/s utilisation of bf16 training steps.

The plain model has bf16 weights and moments: it moves less memory than the compiled program with its fp32 masters, and
is what nobody should train with; so it bounds what can be reached. Its blocks and its loss go through torch.compile, or
with `whole` all of it at once, which takes minutes at 48 layers.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from benchmarks.gpu.case import OPTIM, Case, draw_, rank
from benchmarks.gpu.device import Memory, now, peak_flops
from meg_compile.runtime.groups import Groups
from meg_compile.runtime.optimizer import build_optimizer

WARMUP_STEPS, STEPS = 3, 10
CONTENDERS = ("eager", "compiled", "plain")
TITLES = {"eager": "program, eager", "compiled": "program, compile: true", "plain": "plain model, torch.compile"}


def flops(case: Case) -> float:
    """Of a step: 72 B s L h^2 (1 + s / 12h + V / 12Lh), as Narayanan et al. 2021 (arXiv:2104.04473) count them without
    recomputation, and the half of attention that a causal mask leaves."""
    layers, hidden = case.layers, case.hidden
    more = case.seq / (12 * hidden) + case.vocab / (12 * layers * hidden)
    return 72 * case.rows * case.seq * layers * hidden**2 * (1 + more)


def speed(case: Case, contender: str, groups: Groups, device: torch.device, whole: bool) -> dict[str, Any]:
    """The median over `STEPS` steps. `peak_bytes` is 0 on the CPU, where counting would be traced too."""
    memory = Memory(device)
    started = now(device)
    step = _plain(case, device, whole) if contender == "plain" else _program(case, contender, groups, device)
    for _ in range(WARMUP_STEPS):
        step()
    warm = now(device)
    times = [warm]
    for _ in range(STEPS):
        step()
        times.append(now(device))
    step_s = statistics.median(b - a for a, b in pairwise(times))
    peak = peak_flops(device)
    return {
        "case": case.name,
        "contender": contender,
        "first_steps_s": warm - started,
        "step_s": step_s,
        "tokens_per_s": case.rows * case.seq / step_s,
        "flops_per_s": flops(case) / step_s,
        "mfu": flops(case) / step_s / peak if peak else None,
        "peak_bytes": memory.peak,
    }


def _program(case: Case, contender: str, groups: Groups, device: torch.device) -> Callable[[], float]:
    executor = rank(case.compile(torch.bfloat16), groups, device, compiled=contender == "compiled")
    optimizer, batch = build_optimizer(executor.parameters, OPTIM), case.batch()

    def step() -> float:
        loss = executor.run(batch, 1 / batch["labels"].numel())
        executor.reduce_gradients()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def _plain(case: Case, device: torch.device, whole: bool) -> Callable[[], float]:
    with device:
        model = case.build().to(torch.bfloat16)
    draw_(model.named_parameters())

    def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return cross_entropy(logits.float().flatten(0, 1), labels.flatten())

    def forward(input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return part(model(input_ids), labels)

    part = loss_of if whole else torch.compile(loss_of, dynamic=False)
    run = torch.compile(forward, dynamic=False) if whole else forward
    if not whole:
        for block in model.h:
            block.compile(dynamic=False)
    optimizer = build_optimizer(dict(model.named_parameters()), OPTIM)
    batch = {field: rows.to(device) for field, rows in case.batch().items()}

    def step() -> float:
        loss = run(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step
