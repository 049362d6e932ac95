"""What saving costs: `python -m benchmarks.saving`

Trains a GPT-2 on one process without checkpoints, saving in the foreground and in the background, and prints by how
much a save delays the loop, and how far it and a load raise the peak of memory over the shard (parameters and moments).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.composed import configuration
from meg_compile.checkpoint.resume import look_at
from meg_compile.checkpoint.saver import Saver
from meg_compile.checkpoint.state import counters_of, make_moments, take, tensors_of
from meg_compile.checkpoint.storage import Reader
from meg_compile.prepare import build_dataset, compile_program
from meg_compile.runtime.executor import Executor
from meg_compile.runtime.groups import init_groups
from meg_compile.train.step import Trainer

SETTINGS = (
    "plan=single model.layers=8 model.hidden=512 model.vocab_size=8192 data.seq_len=128 train.global_batch_size=2 "
    "train.micro_batch_size=2 train.steps=1000 launch.device=cpu optim.schedule=constant"
)


class Peak:
    """A context that watches this process's memory; `bytes` is how far it rose over where it stood."""

    def __enter__(self) -> Peak:
        self.start = self.most = _resident()
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join()
        self.bytes = self.most - self.start

    def _watch(self) -> None:
        while not self.over.wait(0.002):
            self.most = max(self.most, _resident())


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def prepared() -> tuple:
    config = configuration(*SETTINGS.split())
    dataset = build_dataset(config)
    program = compile_program(config, dataset)
    groups = init_groups(config.plan.plan().mesh, "cpu")
    executor = Executor(program, groups, torch.device("cpu"))
    executor.load()
    trainer = Trainer(config, program, executor, groups, dataset)
    make_moments(trainer)
    return config, trainer


def step(trainer: Trainer, number: int) -> None:
    trainer.update(number, trainer.gradients(number).norm)


def saved(how: str, folder: Path, steps: int) -> dict:
    """Seconds of the steps between two saves (the second one included), and memory while saving."""
    config, trainer = prepared()
    step(trainer, 0)
    saver = Saver(folder, background=how == "background", keep=1, keep_every=None)
    for number in range(1, 3):
        step(trainer, number)
    with Peak() as peak:
        if how != "none":
            saver.save(3, tensors_of(trainer), counters_of(trainer, 3, config))
            saver.wait()
    started = time.perf_counter()
    call_s = 0.0
    for number in range(3, 3 + steps):
        step(trainer, number)
        if number == 3 and how != "none":
            began = time.perf_counter()
            saver.save(4, tensors_of(trainer), counters_of(trainer, 4, config))
            call_s = time.perf_counter() - began
    loop_s = time.perf_counter() - started
    saver.wait()
    held = [held for held in tensors_of(trainer).values()]
    shard = sum(piece.nbytes for one in held for piece in one.pieces.values())
    largest = max(sum(piece.nbytes for piece in one.pieces.values()) for one in held)
    return {"loop_s": loop_s, "call_s": call_s, "peak": peak.bytes, "shard": shard, "largest": largest}


def loaded(folder: Path) -> dict:
    config, trainer = prepared()
    found = look_at(folder / "step_4")
    with Peak() as peak:
        take(trainer, Reader(found.path, found.index), found.state, config.to_dict())
    return {"peak": peak.bytes}


def alone(*args: str) -> dict:
    """A measurement in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.saving", "--one", *args]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.saving", description=__doc__)
    parser.add_argument("--steps", type=int, default=10, help="steps between two saves (10)")
    parser.add_argument("--rounds", type=int, default=3, help="measurements, of which the medians count (3)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="where to write (a temporary directory)")
    parser.add_argument("--one", nargs=2, metavar=("HOW", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.one:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        how, folder = args.one[0], Path(args.one[1])
        with contextlib.redirect_stdout(io.StringIO()):
            found = loaded(folder) if how == "load" else saved(how, folder, args.steps)
        print(json.dumps(found))
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        options, rounds = ["--steps", str(args.steps), "--threads", str(args.threads)], []
        for number in range(args.rounds):
            ways = ("none", "foreground", "background")
            rounds.append({how: alone(how, f"{name}/{number}_{how}", *options) for how in ways})
        load = alone("load", f"{name}/0_foreground", *options)
    one = rounds[0]["background"]
    mib = 2**20
    print(f"shard {one['shard'] / mib:.0f} MiB, its largest tensor {one['largest'] / mib:.0f} MiB")
    delays = {}
    for how in ("foreground", "background"):
        delays[how] = _median([r[how]["loop_s"] - r["none"]["loop_s"] for r in rounds])
        call = _median([r[how]["call_s"] for r in rounds])
        print(f"{how}: a save delays {args.steps} steps by {delays[how]:.2f} s, the call itself takes {call:.3f} s")
    print(f"background / foreground: {delays['background'] / delays['foreground']:.2f} of the delay (bar 0.20)")
    for how, peak in [(how, rounds[0][how]["peak"]) for how in delays] + [("loading", load["peak"])]:
        copy = one["shard"] if how == "background" else 0
        bar = 1.1 * (copy + one["largest"])
        print(f"{how}: memory rises by {peak / mib:.0f} MiB (bar {bar / mib:.0f})")


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


if __name__ == "__main__":
    main()
