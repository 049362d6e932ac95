"""Checkpoints: saved under one plan, a run goes on under any other as if it had never stopped."""

import json
from pathlib import Path

import models
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from training import config, on_ranks

from meg_compile.checkpoint.saver import Saver
from meg_compile.errors import MegError
from meg_compile.runtime.executor import Executor
from meg_compile.train.loop import train
from meg_compile.train.step import Trainer

ADAM = {"optim__name": "adamw", "optim__lr": 1e-2, "optim__weight_decay": 0.1, "optim__decay": "all"}
ADAM |= {"train__clip_grad": 1.0, "data__shuffle": True}

PLANS = {
    "one": {},
    "tp2": {"plan__tp": 2},
    "pp2": {"plan__pp": 2},
    "tp2_pp2": {"plan__tp": 2, "plan__pp": 2},
    "vpp2": {"plan__pp": 2, "plan__vpp": 2, "plan__schedule": "interleaved_1f1b", "train__micro_batch_size": 1},
    "tp2_sp": {"plan__tp": 2, "plan__sp": True},
    "dp2_zero2": {"plan__dp": 2, "plan__zero": 2},
    "dp2_zero3": {"plan__dp": 2, "plan__zero": 3},
    "tp2_pp2_dp2_zero1": {"plan__tp": 2, "plan__pp": 2, "plan__dp": 2, "plan__zero": 1},
    "cp2": {"plan__cp": 2},
}


class Model(models.TinyGPT):
    """101 words, which two ranks share unevenly; tied."""

    def __init__(self):
        super().__init__(vocab=101)


ROWS = models.FixedRows(vocab=101)


def run(run_dir: Path, stop_after=None, factory=Model, rows=ROWS, **settings):
    """Train; with `stop_after`, ask the last rank to stop during that step. The losses that are in metrics.jsonl."""
    run_dir.mkdir(exist_ok=True)
    settings = config(**settings)

    class Asked(Executor):
        def run(self, batch, scale, reduce=False):
            self.count = getattr(self, "count", 0) + 1
            if self.count == stop_after and self.groups.rank == self.groups.mesh.size - 1:
                self.asked[15] = True
            return super().run(batch, scale, reduce)

    def work(program, executor, groups):
        from unittest.mock import patch

        return train(settings, program, executor, groups, rows, run_dir)

    results = on_ranks(settings, work, factory, rows)
    return results[0], [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_first(tmp_path):
    common = ADAM | {"train__steps": 6}
    _, right = run(tmp_path / "all", **common)
    ck = {"checkpoint__dir": str(tmp_path / "ck"), "checkpoint__every": 3}
    _, a = run(tmp_path / "a", **common, **ck, **PLANS["tp2"])
    print(sorted(p.name for p in (tmp_path / "ck").rglob("*")))
