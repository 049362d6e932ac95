"""A run that is killed or told to stop, and typed again: real processes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_launch import LOSSES, NORMS, ROOT, TESTS, assert_all_gone

COMMAND = (
    "model._target_=models.TinyGPT data._target_=slow.Rows experiment=plain_sgd train.check=false launch.threads=1 "
    "plan=tp2 train.steps=200 checkpoint.dir=ck checkpoint.every=2 hydra.run.dir=run"
).split()

SLOW = """
import os, time
import models
import meg_compile.checkpoint.saver as saver

write = saver.write_tensors

def slowly(path, tensors):  # step 4 is never written whole
    if os.environ.get("TEST_HANG") and path.parent.name == "step_4.part":
        path.write_bytes(b"half")
        time.sleep(60)
    return write(path, tensors)

saver.write_tensors = slowly

class Rows(models.FixedRows):
    def __getitem__(self, i):
        time.sleep(0.01)
        return super().__getitem__(i)
"""


def start(directory: Path, **env: str) -> subprocess.Popen:
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{TESTS}:{directory}"} | env
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, str(ROOT / "run.py"), *COMMAND], cwd=directory, env=env, **pipes)


def wait_for(found, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 60
    while not found():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.05)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="workers end with a parent that is killed on Linux only")
def test_killed_while_it_saves_then_told_to_stop(tmp_path):
    """Killed while step_4 is being written, the run goes on from step_2, and SIGTERM ends it at a step of all ranks."""
    (tmp_path / "slow.py").write_text(SLOW)
    ck, run_dir = tmp_path / "ck", tmp_path / "run"
    killed = start(tmp_path, TEST_HANG="1")
    wait_for((ck / "step_4.part" / "rank_1.safetensors").exists, killed)
    killed.kill()
    killed.communicate()
    assert_all_gone(run_dir)
    assert sorted(path.name for path in ck.iterdir()) == ["step_2", "step_4.part"]

    stopped = start(tmp_path)
    wait_for(
        lambda: (run_dir / "metrics.jsonl").exists() and '"step": 6' in (run_dir / "metrics.jsonl").read_text(), stopped
    )
    stopped.send_signal(signal.SIGTERM)
    out, err = stopped.communicate(timeout=60)
    assert_all_gone(run_dir)
    assert stopped.returncode == 128 + signal.SIGTERM, err
    assert "checkpoint: step_4.part is passed over: it was not finished" in out
    assert f"checkpoint: goes on from {ck / 'step_2'}" in out
    result = json.loads((run_dir / "result.json").read_text())
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    last = lines[-1]["step"]
    assert (result["status"], result["signal"], result["steps"]) == ("stopped", signal.SIGTERM, last - 2)
    assert result["checkpoint"] == str(ck / f"step_{last}") and f"saved in {ck / f'step_{last}'}" in err
    assert (ck / f"step_{last}" / "manifest.json").exists() and not list(ck.glob("*.part"))
    assert [line["step"] for line in lines] == list(range(1, last + 1)) and 6 <= last < 200
    assert [line["loss"] for line in lines[:5]] == pytest.approx(LOSSES, rel=1e-9)
    assert [line["grad_norm"] for line in lines[:5]] == pytest.approx(NORMS, rel=1e-9)
