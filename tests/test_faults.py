"""Runs that hang, that are started again, and that span machines."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from threading import Thread

import pytest
import torch
import torch.distributed as dist
from test_launch import LOSSES, ROOT, TESTS, TINY, assert_all_gone, run_py
from training import config

from meg_compile.config import Here, resolve
from meg_compile.errors import RankFailed
from meg_compile.runtime.launch import launch
from meg_compile.runtime.watch import WAITS, Watch, progress, verdict
from meg_compile.runtime.world import attempt_name, join

PATIENCE = 1.0


def hang(run_dir: Path) -> None:
    """Rank 1 is slow but gets on, for longer than the others wait without it, and then does not."""
    world = join()
    with Watch(world.store, world.rank, world.size, PATIENCE, run_dir):
        if world.rank == 1:
            for _ in range(20):
                time.sleep(0.1)
                progress()
            time.sleep(1000)
        world.init_process_group(torch.device("cpu"))


@pytest.mark.dist
def test_a_hang_ends_with_the_stacks_of_all_ranks(tmp_path, capfd):
    with pytest.raises(RankFailed) as raised:
        launch("test_faults:hang", 3, tmp_path, "cpu", threads=1)
    assert_all_gone(tmp_path)
    assert raised.value.rank == 1 and not raised.value.comes_again
    first, culprit, others, where = raised.value.text.splitlines()
    assert first == "no rank has made progress for 1 s (launch.timeout):"
    assert re.fullmatch(r"  rank 1: .*test_faults.py:\d+ in hang: time.sleep\(1000\)", culprit)
    assert others.startswith("  ranks 0, 2: ") and others.endswith(f"{WAITS}init_process_group")
    assert where == f"stacks of all ranks: {tmp_path / 'logs'}/rank_N.stack"
    stacks = [(tmp_path / "logs" / f"rank_{rank}.stack").read_text() for rank in range(3)]
    assert ['test_faults.py"' in stack for stack in stacks] == [True] * 3
    assert "".join(capfd.readouterr()) == ""


def test_ranks_that_do_not_answer_are_named_first():
    waits = f"a.py:1 in f: g() {WAITS}all_reduce"
    places = {0: waits, 1: "", 2: waits, 3: waits, 4: "b.py:2 in h: i()", 5: waits}
    said = ["  rank 1: does not answer", "  rank 4: b.py:2 in h: i()", f"  ranks 0, 2-3, 5: {waits}"]
    assert verdict(places) == (None, said)
    assert verdict({**places, 1: waits})[0] == 4


def test_processes_of_one_attempt_find_each_other_in_the_store_of_all_attempts():
    store, names = dist.HashStore(), []
    for _ in range(3):
        found: dict[int, str] = {}

        def meet(rank, found=found):
            found[rank] = attempt_name(store, rank, 3)

        threads = [Thread(target=meet, args=(rank,)) for rank in (1, 2, 0)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 3 and len(set(found.values())) == 1
        names.append(found[0])
    assert len(set(names)) == 3


@pytest.mark.parametrize(
    "changes, under_torchrun, words",
    [
        ({"launch__max_restarts": 2}, False, "no checkpoint to go on from; add checkpoint.dir=DIR"),
        ({"launch__max_restarts": 2, "checkpoint__dir": "ck", "checkpoint__resume": None}, False, "starts afresh"),
        ({"launch__max_restarts": 2, "checkpoint__dir": "ck"}, True, "use torchrun's --max-restarts=2"),
        ({"launch__max_restarts": 2, "checkpoint__dir": "ck", "task": "verify"}, False, "task=verify saves nothing"),
        ({"launch__max_restarts": 2, "checkpoint__dir": "ck"}, False, ""),
        ({"checkpoint__dir": f"{__file__}/ck"}, False, "test_faults.py is a file, not a directory"),
        ({"task": "generate", "generate__prompts": [[1]], "init__path": "w", "plan__dp": 3}, False, ""),
        ({}, True, ""),
    ],
)
def test_restarts_that_have_nothing_to_go_on_from_are_refused(changes, under_torchrun, words):
    here = Here(world_size=1 if under_torchrun else None)
    _, faults = resolve(config(**changes).to_dict(), [], here, Path.cwd())
    assert words in "".join(map(str, faults)) and bool(words) == bool(faults)


UNLUCKY = """
import os, signal, time
from pathlib import Path
import models
import meg_compile.checkpoint.saver as saver

saver.PATIENCE_SECONDS = 1  # for a checkpoint that will not be finished
write = saver.write_tensors

def slowly(path, tensors):
    if path.parent.name == "step_3.part" and Path("plan_raise").exists():
        time.sleep(1000)
    return write(path, tensors)

saver.write_tensors = slowly

def is_due(how):
    return os.environ.get("RANK") == "1" and Path(f"plan_{how}").exists()

class Rows(models.FixedRows):
    '''Rank 1 is killed in step 3, or hangs in step 5.'''

    def __getitem__(self, i):
        if is_due("kill") and i == 20:
            os.kill(os.getpid(), signal.SIGKILL)
        if is_due("hang") and i == 36:
            Path("plan_hang").unlink()
            time.sleep(1000)
        return super().__getitem__(i)

class Valid(models.FixedRows):
    '''On rank 1 no row can be read while the checkpoint of step 3 is being written.'''

    def __getitem__(self, i):
        if is_due("raise") and Path("ck/step_3.part").exists():
            Path("plan_raise").unlink()
            raise ValueError("planted failure")
        return super().__getitem__(i)
"""
SETTINGS = [*TINY, "data._target_=unlucky.Rows", "checkpoint.dir=ck", "checkpoint.every=1"]


def plant(directory: Path, *hows: str) -> None:
    (directory / "unlucky.py").write_text(UNLUCKY)
    for how in hows:
        (directory / f"plan_{how}").touch()


def losses_of(run_dir: Path) -> list[float]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["loss"] for line in lines]


@pytest.mark.dist
@pytest.mark.slow
def test_it_goes_on_after_each_failure(tmp_path):
    """A rank raises in a validation while a checkpoint is being written; in the next attempt it hangs."""
    plant(tmp_path, "raise", "hang")
    validation = "eval.every=1 eval.batches=1 eval.data._target_=unlucky.Valid".split()
    again = "launch.max_restarts=2 launch.timeout=6 hydra.run.dir=run".split()
    ran = run_py(tmp_path, *SETTINGS, *validation, *again)
    assert ran.returncode == 0, ran.stderr
    assert_all_gone(tmp_path / "run")
    hung = (
        r"no rank has made progress for 6 s .*\n  rank 1: \S+unlucky.py:\d+ in __getitem__: time.sleep\(1000\)\n(.*\n)+"
    )
    said = r"rank 1 failed:\n(.*\n)*.*ValueError: planted failure.*\n(.*\n)*restart 1 of 2\n"
    assert re.fullmatch(rf"{said}rank 1 failed:\n{hung}restart 2 of 2\n", ran.stderr), ran.stderr
    assert ran.stderr.count("planted failure") == 1
    assert re.findall(r"goes on from .*/(step_\d)", ran.stdout) == ["step_2", "step_4"]
    assert losses_of(tmp_path / "run") == pytest.approx(LOSSES, rel=1e-9)
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "ok"


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="names the loopback interface")
def test_two_machines_of_which_one_loses_its_process(tmp_path):
    plant(tmp_path, "kill")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, str(ROOT / "run.py"), *SETTINGS, "plan=pp2"]
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{TESTS}", "GLOO_SOCKET_IFNAME": "lo"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    nodes = [subprocess.Popen(command, cwd=tmp_path, env=env, **pipes) for _ in range(2)]
    try:
        said = [node.communicate(timeout=120)[1] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert all(node.returncode for node in nodes)
    assert sum("(SIGKILL)" in err for err in said) == 1
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert losses_of(run_dir) == pytest.approx(LOSSES[:2], rel=1e-9)
    assert_all_gone(run_dir)
