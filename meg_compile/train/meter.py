"""Throughput and memory: how near a run comes to what its GPUs could do, and where the time goes."""

from __future__ import annotations

import os
import resource
import sys
from typing import Any

import torch
import torch.distributed as dist

from meg_compile.train.timers import PHASES, Timers

# Dense matrix products, without sparsity, in 10^12 operations a second, from the vendors' data sheets: bf16 and fp16,
# fp32 without TF32, fp64. The first name that is in the device's counts.
PEAK_TFLOPS: dict[str, tuple[float, float, float]] = {
    "GB200": (2500, 80, 40),
    "B200": (2250, 75, 37),
    "H200": (989, 67, 67),
    "H100 PCIe": (756, 51, 51),
    "H100 NVL": (835, 60, 60),
    "H100": (989, 67, 67),
    "A100": (312, 19.5, 19.5),
    "L40S": (362, 91.6, 1.4),
    "L4": (121, 30.3, 0.5),
    "MI300X": (1307, 163, 163),
}
KINDS = {"bf16": 0, "fp16": 0, "fp32": 1, "fp64": 2}


def peak_tflops(device_name: str, precision: str) -> float | None:
    """What a GPU of that name could do in that precision; None for one that is not known."""
    found = next((peaks for name, peaks in PEAK_TFLOPS.items() if name in device_name), None)
    return found and found[KINDS[precision]]


class Meter:
    """What the records of steps say besides loss and learning rate; `step` is a collective every `log.every` steps.

    flops_per_row: of the plain model (`Program.training_flops`). peak: TFLOP/s that a rank could do at most; None where
    that is not known, so that no utilisation is shown.
    """

    def __init__(self, config: Any, program: Any, device: torch.device, timers: Timers):
        self.every, self.steps, self.device, self.timers = config.log.every, config.train.steps, device, timers
        self.flops_per_row = program.training_flops() / program.micro_batch_size
        self.num_ranks = config.num_ranks
        self.peak = config.log.peak_tflops
        if self.peak is None and device.type == "cuda":
            self.peak = peak_tflops(torch.cuda.get_device_name(device), config.precision)
        self._since = 0
        self.phase_s: dict[str, list[float]] = {}

    def rates(self, step_s: float, num_rows: int) -> dict[str, float]:
        """tflops_per_rank: 10^12 floating-point operations of the model a second. mfu: of what a rank could do."""
        tflops = self.flops_per_row * num_rows / (step_s * 1e12 * self.num_ranks)
        return {"tflops_per_rank": tflops} | ({} if self.peak is None else {"mfu": tflops / self.peak})

    def step(self, step: int, step_s: float, num_rows: int) -> dict[str, Any]:
        """Of the step just done, from 0, over so many rows: its rates; at every `log.every`-th and the last one the
        smallest and largest values of all ranks too: phase_s (seconds a step, mean since the last time), memory_bytes
        and peak_memory_bytes."""
        self._since += 1
        found: dict[str, Any] = self.rates(step_s, num_rows)
        if (step + 1) % self.every and step + 1 != self.steps:
            return found
        seconds = {phase: total / self._since for phase, total in self.timers.take().items()}
        mine = [*(seconds.get(phase, 0.0) for phase in PHASES), *memory_bytes(self.device)]
        ranges = _ranges(mine, self.device)
        *of_phases, memory, peak = ranges
        self.phase_s = {phase: found for phase, found in zip(PHASES, of_phases, strict=True) if found[1]}
        self._since = 0
        as_bytes = {"memory_bytes": memory, "peak_memory_bytes": peak}
        found |= {"phase_s": self.phase_s} if self.phase_s else {}
        return found | {name: [int(value) for value in values] for name, values in as_bytes.items()}


def memory_bytes(device: torch.device) -> tuple[int, int]:
    """What this process holds, and the most that it has held: on the device where it is a GPU, else in main memory."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak = peak if sys.platform == "darwin" else peak * 1024
    if not os.path.exists("/proc/self/statm"):
        return peak, peak
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resident, max(peak, resident)


def _ranges(values: list[float], device: torch.device) -> list[list[float]]:
    """Of each value the smallest and the largest over all ranks, by one all-reduce."""
    both = torch.tensor([[-value, value] for value in values], dtype=torch.float64, device=device)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(both, dist.ReduceOp.MAX)
    return [[-negated, largest] for negated, largest in both.tolist()]
