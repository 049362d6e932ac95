"""Training runs that stop and go on, for tests of checkpoints."""

import json
from pathlib import Path
from unittest.mock import patch

import models
from training import config, on_ranks

from meg_compile.train.loop import train
from meg_compile.train.step import Trainer

TERM = 15
ADAM = {"optim__name": "adamw", "optim__lr": 1e-2, "optim__weight_decay": 0.1, "optim__decay": "all"}
PLANS = {
    "one": {},
    "tp2": {"plan__tp": 2},
    "pp2": {"plan__pp": 2},
    "tp2_pp2": {"plan__tp": 2, "plan__pp": 2},
    "vpp2": {"plan__pp": 2, "plan__vpp": 2, "plan__schedule": "interleaved_1f1b", "train__micro_batch_size": 1},
    "tp2_sp": {"plan__tp": 2, "plan__sp": True},
    "dp2": {"plan__dp": 2},
    "dp2_zero2": {"plan__dp": 2, "plan__zero": 2},
    "dp2_zero3": {"plan__dp": 2, "plan__zero": 3},
    "tp2_pp2_dp2_zero1": {"plan__tp": 2, "plan__pp": 2, "plan__dp": 2, "plan__zero": 1},
    "cp2": {"plan__cp": 2},
}


def run(run_dir: Path, stop_at=None, factory=models.TinyGPT, rows=None, **settings):
    """Train; with `stop_at`, the last rank alone is asked to stop in that step. (result, lines of metrics.jsonl)."""
    run_dir.mkdir(exist_ok=True)
    rows, settings, gradients = rows or models.FixedRows(), config(**settings), Trainer.gradients

    def asked(trainer, step):
        if step + 1 == stop_at and trainer.groups.rank == trainer.groups.mesh.size - 1:
            trainer.asked[TERM] = True
        return gradients(trainer, step)

    def work(program, executor, groups):
        return train(settings, program, executor, groups, rows, run_dir)

    with patch.object(Trainer, "gradients", asked):
        results = on_ranks(settings, work, factory, rows)
    assert all(result["status"] == results[0]["status"] for result in results)
    return results[0], [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
