"""Runs that hang, and that are started again (real processes)."""

import json
import os
import re
import time
from pathlib import Path

import pytest
from test_launch import LOSSES, TINY, assert_all_gone, run_py

from meg_compile.errors import RankFailed
from meg_compile.runtime.launch import launch
from meg_compile.runtime.watch import WAITS, Watch, progress
from meg_compile.runtime.world import join

PATIENCE = 1.0


def hang(run_dir: Path) -> None:
    """Rank 1 sleeps, getting on or not, before the others' collective ends."""
    import torch
    import torch.distributed as dist

    world = join()
    with Watch(world.store, world.rank, world.size, PATIENCE, run_dir):
        if world.rank == 1 and os.environ["TEST_HANG"] == "early":
            time.sleep(60)
        world.init_process_group(torch.device("cpu"))
        if world.rank == 1:
            for _ in range(20):
                time.sleep(0.1)
                progress()
            if os.environ["TEST_HANG"] == "stop":
                os.kill(os.getpid(), 19)
        dist.all_reduce(torch.ones(1))
        dist.destroy_process_group()


@pytest.mark.dist
def test_a_slow_rank_that_gets_on_does_not_hang(tmp_path, monkeypatch):
    monkeypatch.setenv("TEST_HANG", "no")
    launch("test_faults:hang", 2, tmp_path, "cpu", threads=1)


@pytest.mark.dist
def test_a_hang_ends_with_the_stacks_of_all_ranks(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("TEST_HANG", "early")
    started = time.monotonic()
    with pytest.raises(RankFailed) as raised:
        launch("test_faults:hang", 3, tmp_path, "cpu", threads=1)
    assert time.monotonic() - started < 30
    assert_all_gone(tmp_path)
    assert raised.value.rank == 1 and not raised.value.comes_again
    first, culprit, others, *_ = raised.value.text.splitlines()
    assert first == "no rank has made progress for 1 s (launch.timeout): "
    assert re.fullmatch(r"  rank 1: .*test_faults.py:\d+ in hang: time.sleep\(60\)", culprit)
    assert others.startswith("  ranks 0, 2: ") and others.endswith(f"{WAITS}init_process_group")
    stacks = [(tmp_path / "logs" / f"rank_{rank}.stack").read_text() for rank in range(3)]
    assert ['test_faults.py"' in stack for stack in stacks] == [True] * 3
    assert "".join(capfd.readouterr()) == ""


UNLUCKY = """
import os, signal, time
from pathlib import Path
import models

class Rows(models.FixedRows):
    '''Rows 16 to 23 (step 3) go wrong on rank 1 in another way in each attempt.'''

    def __getitem__(self, i):
        if os.environ.get("RANK") == "1" and i == 20 and Path("once").exists():
            Path("once").rename("twice")
            os.kill(os.getpid(), signal.SIGKILL)
        if os.environ.get("RANK") == "1" and i == 26 and Path("twice").exists():
            Path("twice").unlink()
            time.sleep(1000)
        return super().__getitem__(i)
"""


def lines_of(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.dist
@pytest.mark.slow
def test_killed_then_hung_it_goes_on_each_time(tmp_path):
    """In step 3 a rank is killed, and in step 4 of the next attempt it hangs."""
    (tmp_path / "unlucky.py").write_text(UNLUCKY)
    (tmp_path / "once").touch()
    settings = "data._target_=unlucky.Rows checkpoint.dir=ck checkpoint.every=1 launch.max_restarts=2 launch.timeout=6"
    ran = run_py(tmp_path, *TINY, *settings.split(), "hydra.run.dir=run")
    assert ran.returncode == 0, ran.stderr
    assert_all_gone(tmp_path / "run")
    assert ran.stderr.count("killed by signal 9") == ran.stderr.count("no rank has made progress for 6 s") == 1
    again = r"\nrestart 1 of 2\nrank 1 failed:\nno rank .*\n  rank 1: \S+unlucky.py:\d+ in __getitem__: time.sleep"
    assert re.search(again, ran.stderr)
    assert ran.stderr.endswith("\nrestart 2 of 2\n") and ran.stdout.count("checkpoint: goes on from") == 2
    assert [line["step"] for line in lines_of(tmp_path / "run")] == [1, 2, 3, 4, 5]
    assert [line["loss"] for line in lines_of(tmp_path / "run")] == pytest.approx(LOSSES, rel=1e-9)
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "ok"
