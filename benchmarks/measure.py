"""Steps of several contenders, taken in turn in the same processes: what else the machine does hits all alike."""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.contenders import Step
from benchmarks.contests import CONTESTS, Contest, Pair
from benchmarks.model import Size, batch

WARMUP_STEPS = 2
LOSS_TOLERANCE = 1e-4


def measure(sizes: Sequence[Size], steps: int, keys: Sequence[str]) -> list[dict[str, Any]]:
    """One row per pair and size, for the pairs named in `keys`; starts the processes.

    AssertionError, from the processes, where two contenders' losses differ by more than `LOSS_TOLERANCE`.
    """
    rows = []
    for nproc, contests in itertools.groupby(CONTESTS, lambda contest: contest.nproc):
        numbers = [CONTESTS.index(c) for c in contests if any(pair.key in keys for pair in c.pairs)]
        if numbers:
            rows += _run(nproc, numbers, sizes, steps)
    return [row for row in rows if row["pair"] in keys]


def _run(nproc: int, numbers: list[int], sizes: Sequence[Size], steps: int) -> list[dict[str, Any]]:
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory(prefix="benchmarks_") as scratch:
        mp.spawn(_rank, (nproc, numbers, sizes, steps, scratch), nproc)
        return json.loads(Path(scratch, "rows.json").read_text())


def _rank(rank: int, nproc: int, numbers: list[int], sizes: Sequence[Size], steps: int, scratch: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{scratch}/store", rank=rank, world_size=nproc)
    rows = [row for number in numbers for size in sizes for row in _contest(CONTESTS[number], size, steps)]
    if rank == 0:
        Path(scratch, "rows.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def _contest(contest: Contest, size: Size, steps: int) -> list[dict[str, Any]]:
    contenders = contest.build(size)
    names = list(contenders)
    wall_s: dict[str, list[float]] = {name: [] for name in names}
    cpu_s: dict[str, list[float]] = {name: [] for name in names}
    for step in range(WARMUP_STEPS + steps):
        if dist.get_rank() == 0:
            print(f"\r{size}: {', '.join(names)}: step {step + 1} ", end="", file=sys.stderr, flush=True)
        rows = batch(size, contest.rows, step)
        first = step % len(names)
        losses = {}
        for name in names[first:] + names[:first]:
            wall, cpu, losses[name] = _timed(contenders[name], rows)
            if step >= WARMUP_STEPS:
                wall_s[name].append(wall)
                cpu_s[name].append(cpu)
        _assert_equal(losses, f"{size}, step {step}")
    if dist.get_rank() == 0:
        print(file=sys.stderr)
    return [_row(pair, size, wall_s, cpu_s) for pair in contest.pairs]


def _timed(step: Step, rows: dict[str, torch.Tensor]) -> tuple[float, float, float | None]:
    """(seconds until every rank is done, CPU seconds of all ranks, the loss)."""
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    loss = step(rows)
    cpu = time.process_time() - cpu
    dist.barrier()
    wall = time.perf_counter() - wall
    total = torch.tensor(cpu, dtype=torch.float64)
    dist.all_reduce(total)
    return wall, total.item(), loss


def _assert_equal(losses: dict[str, float | None], where: str) -> None:
    known = {name: loss for name, loss in losses.items() if loss is not None}
    spread = max(known.values(), default=0) - min(known.values(), default=0)
    assert spread <= LOSS_TOLERANCE, f"{where}: the losses differ: {known}"


def _row(pair: Pair, size: Size, wall_s: dict[str, list[float]], cpu_s: dict[str, list[float]]) -> dict[str, Any]:
    """`ratio` is the median over the steps of ours / theirs of the same step, between its `quartiles`."""
    low, middle, high = _quartiles(wall_s, pair)
    return {
        "pair": pair.key,
        "title": pair.title,
        "size": str(size),
        "ratio": middle,
        "quartiles": [low, high],
        "cpu_ratio": _quartiles(cpu_s, pair)[1],
        "wall_s": [statistics.median(wall_s[name]) for name in (pair.ours, pair.theirs)],
        "cpu_s": [statistics.median(cpu_s[name]) for name in (pair.ours, pair.theirs)],
        "steps": len(wall_s[pair.ours]),
        "bar": pair.bar,
        "met": middle <= pair.bar,
    }


def _quartiles(seconds: dict[str, list[float]], pair: Pair) -> list[float]:
    ratios = [ours / theirs for ours, theirs in zip(seconds[pair.ours], seconds[pair.theirs], strict=True)]
    return statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
