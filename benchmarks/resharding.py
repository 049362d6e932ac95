"""Does a run go on under another plan as if it had never stopped? `python -m benchmarks.resharding`

Trains a GPT-2 with AdamW in float64 for 6 steps under each plan, saving after 3, and from each of these checkpoints 3
more steps under every plan; ranks are threads. Prints the largest relative difference of the losses and gradient norms
of steps 4 to 6 from those of the run under the first plan that was never stopped, for every ordered pair.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import tempfile
import time
from functools import cache
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.composed import configuration
from benchmarks.threads import run_threads
from meg_compile.config import Config
from meg_compile.explain.table import table
from meg_compile.prepare import build_dataset, compile_program
from meg_compile.program import Program
from meg_compile.runtime.executor import Executor
from meg_compile.runtime.groups import init_groups
from meg_compile.train.loop import train

PLANS = {
    "one": "",
    "tp2": "plan.tp=2",
    "pp2": "plan.pp=2",
    "tp2_pp2": "plan.tp=2 plan.pp=2",
    "pp2_vpp2": "plan.pp=2 plan.vpp=2 plan.schedule=interleaved_1f1b",
    "dp2_zero2": "plan.dp=2 plan.zero=2",
    "dp2_zero3": "plan.dp=2 plan.zero=3",
    "tp2_sp": "plan.tp=2 plan.sp=true",
    "cp2": "plan.cp=2",
    "tp2_pp2_dp2_zero1": "plan.tp=2 plan.pp=2 plan.dp=2 plan.zero=1",
}
SETTINGS = (
    "plan=single precision=fp64 model.layers=4 model.hidden=32 model.heads=4 model.vocab_size=301 model.dropout=0.1 "
    "data.seq_len=16 data.shuffle=true train.steps=6 train.global_batch_size=8 train.micro_batch_size=2 "
    "optim.schedule=constant optim.lr=0.01 optim.decay=all launch.threads=1 launch.device=cpu checkpoint.every=3"
)
TOLERANCE = 1e-9  # sums in another order differ by about 1e-13; lost moments by 1e-2


@cache
def compiled(plan: str) -> Program:
    config = configuration(*SETTINGS.split(), *PLANS[plan].split(), "checkpoint.every=null")
    return compile_program(config, build_dataset(config))


def trained(plan: str, run_dir: Path, *settings: str) -> list[dict]:
    """The lines of metrics.jsonl of a run under a plan."""
    config = configuration(*SETTINGS.split(), *PLANS[plan].split(), *settings)
    run_dir.mkdir()
    program = compiled(plan)
    with contextlib.redirect_stdout(io.StringIO()):
        run_threads(config.num_ranks, lambda _: on_rank(config, program, run_dir))
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def on_rank(config: Config, program: Program, run_dir: Path) -> None:
    groups = init_groups(config.plan.plan().mesh, "cpu")
    executor = Executor(program, groups, torch.device("cpu"), config.train.seed)
    executor.load()
    dist.barrier()
    train(config, program, executor, groups, build_dataset(config), run_dir)


def difference(lines: list[dict], right: list[dict]) -> float:
    """The largest relative one of losses and norms. All steps must be there, once each, in order."""
    if [line["step"] for line in lines] != [line["step"] for line in right]:
        return float("inf")
    pairs = [(a[key], b[key]) for a, b in zip(lines, right, strict=True) for key in ("loss", "grad_norm")]
    return max(abs(got - wanted) / abs(wanted) for got, wanted in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.resharding", description=__doc__)
    parser.add_argument("--plans", nargs="+", choices=PLANS, default=list(PLANS))
    chosen = parser.parse_args().plans
    started, worst, rows = time.perf_counter(), 0.0, {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        right = trained(chosen[0], folder / "never_stopped", "checkpoint.every=null")
        for plan in chosen:
            lines = trained(plan, folder / plan, f"checkpoint.dir={folder / 'ck' / plan}")
            worst = max(worst, difference(lines, right))
        for saved, loaded in product(chosen, chosen):
            start = f"checkpoint.resume={folder / 'ck' / saved / 'step_3'}"
            found = difference(trained(loaded, folder / f"{saved}_to_{loaded}", start, "checkpoint.every=null"), right)
            rows.setdefault(saved, []).append(f"{found:.0e}")
            worst = max(worst, found)
            print(".", end="", file=sys.stderr, flush=True)
    print("\n" + table(("saved under \\ goes on under", *chosen), [(plan, *cells) for plan, cells in rows.items()]))
    seconds = time.perf_counter() - started
    print(f"{len(chosen) ** 2} ordered pairs; largest difference {worst:.1e}, allowed {TOLERANCE:.0e}; {seconds:.0f} s")
    sys.exit(worst > TOLERANCE)


if __name__ == "__main__":
    main()
