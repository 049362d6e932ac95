"""Worker processes: started over loopback, and all gone soon after one fails, with the cause shown once (C26)."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meg_compile.errors import Fault, RankFailed, Refused
from meg_compile.runtime.blame import first_failure
from meg_compile.runtime.launch import launch

ROOT, TESTS = Path(__file__).parents[1], Path(__file__).parent
SECONDS_TO_STOP = 30

TINY = (
    "model._target_=models.TinyGPT data._target_=models.CrashRows experiment=plain_sgd train.check=false "
    "launch.threads=1 plan=tp2"
).split()


# Entries that the workers of these tests run.


def reduce(run_dir: Path) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    print(f"rank {os.environ['RANK']} total {total.item():g} threads {torch.get_num_threads()}", flush=True)
    if wait := os.environ.get("TEST_WAIT"):
        (run_dir / f"ready_{os.environ['RANK']}").touch()
        time.sleep(float(wait))
    dist.destroy_process_group()


def fail(run_dir: Path) -> None:
    """One rank fails in its fourth step, while the others wait for it in a collective."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    how, rank = os.environ["TEST_FAIL"].split()
    for step in range(100):
        if step == 3 and os.environ["RANK"] == rank:
            if how == "raise":
                raise ValueError("planted failure")
            if how == "exit":
                os._exit(3)
            if how == "sys.exit":
                sys.exit(0)
            if how == "refuse":
                raise Refused(Fault("data.path", "x", "no such row"))
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(10))


def processes_of(run_dir: Path) -> list[int]:
    """The workers of a run, by their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if str(run_dir).encode() in command:
            found.append(int(path.parent.name))
    return found


def assert_all_gone(run_dir: Path) -> None:
    deadline = time.monotonic() + SECONDS_TO_STOP
    while processes_of(run_dir):
        assert time.monotonic() < deadline, "workers are left over"
        time.sleep(0.1)


@pytest.mark.dist
def test_only_rank_0_writes_to_the_console(tmp_path, capfd):
    launch("test_launch:reduce", 2, tmp_path, "cpu", threads=1)
    out, err = capfd.readouterr()
    assert out.splitlines() == ["rank 0 total 2 threads 1"]
    assert err == ""
    assert (tmp_path / "logs" / "rank_1.log").read_text() == "rank 1 total 2 threads 1\n"
    assert_all_gone(tmp_path)


@pytest.mark.dist
@pytest.mark.parametrize(
    "how, rank, words",
    [
        ("raise", 1, ["Traceback", "ValueError: planted failure"]),
        ("raise", 0, ["Traceback", "ValueError: planted failure"]),
        ("kill", 2, ["killed by signal 9, SIGKILL"]),
        ("exit", 1, ["ended with exit code 3"]),
        ("sys.exit", 1, ["test_launch.py:", "called exit(0)"]),
        ("refuse", 0, ["data.path=x: no such row"]),
    ],
)
def test_the_first_failure_is_raised_once_and_all_stop(how, rank, words, tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("TEST_FAIL", f"{how} {rank}")
    started = time.monotonic()
    with pytest.raises(RankFailed) as raised:
        launch("test_launch:fail", 3, tmp_path, "cpu")
    assert time.monotonic() - started < 2 * SECONDS_TO_STOP
    assert_all_gone(tmp_path)
    assert raised.value.rank == rank and raised.value.comes_again == (how == "refuse")
    assert all(word in raised.value.text for word in words)
    assert "Traceback" not in "".join(capfd.readouterr())
    assert how in ("raise", "kill", "exit") or "Traceback" not in raised.value.text
    launch("test_launch:reduce", 2, tmp_path, "cpu")  # the same directory works again at once


@pytest.mark.dist
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_nothing_listens_beyond_loopback(tmp_path):
    parent = start_waiting(tmp_path)
    try:
        addresses = listening([parent.pid, *processes_of(tmp_path)])
        assert len(addresses) >= 2
        assert all(address == "127.0.0.1" for address in addresses), addresses
    finally:
        parent.terminate()
        parent.communicate(timeout=SECONDS_TO_STOP)
    assert_all_gone(tmp_path)


@pytest.mark.dist
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_workers_do_not_outlive_their_parent(number, tmp_path):
    parent = start_waiting(tmp_path)
    parent.send_signal(number)
    out, err = parent.communicate(timeout=SECONDS_TO_STOP)
    assert_all_gone(tmp_path)
    assert "Traceback" not in err
    assert parent.returncode == -number if number == signal.SIGKILL else f"stopped by {int(number)}" in out


def start_waiting(run_dir: Path) -> subprocess.Popen:
    """A process that has two workers, all of them waiting."""
    script = (
        "import sys; from pathlib import Path; from meg_compile.runtime.launch import launch\n"
        "try: launch('test_launch:reduce', 2, Path(sys.argv[1]), 'cpu')\n"
        "except KeyboardInterrupt as stop: print('stopped by', stop.args[0])"
    )
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{TESTS}", "TEST_WAIT": "60"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    parent = subprocess.Popen([sys.executable, "-c", script, str(run_dir)], env=env, **pipes)
    deadline = time.monotonic() + 60
    while not all((run_dir / f"ready_{rank}").exists() for rank in (0, 1)):
        assert parent.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    return parent


def listening(pids: list[int]) -> list[str]:
    """The addresses on which processes listen for TCP connections."""
    sockets = set()
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            if match := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(fd)):
                sockets.add(match[1])
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and inode in sockets:
                raw = bytes.fromhex(local.split(":")[0])
                found.append(".".join(map(str, reversed(raw))) if table == "tcp" else raw.hex())
    return found


# Who is blamed.


class Failure:
    """A ProcessFailure as torch's launcher reports it."""

    def __init__(self, tmp_path, exitcode, timestamp, text=None):
        self.exitcode, self.timestamp = exitcode, timestamp
        self.message = {"message": text, "extraInfo": {"py_callstack": text}} if text else "Signal"
        self.error_file = str(tmp_path / f"error_{id(self)}.json")
        Path(self.error_file).touch()
        os.utime(self.error_file, (timestamp, timestamp))

    def signal_name(self):
        return signal.Signals(-self.exitcode).name


def test_a_lost_connection_is_a_consequence(tmp_path):
    lost = "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:1"
    failures = {
        0: Failure(tmp_path, 1, 100.1, lost),
        1: Failure(tmp_path, -9, 100),
        2: Failure(tmp_path, -15, 99),
        3: Failure(tmp_path, 1, 100.2, lost),
    }

    def blamed():
        failed = first_failure(failures, tmp_path)
        return failed.rank, failed.text

    assert blamed()[0] == 1
    failures[3] = Failure(tmp_path, 1, 100.2, "ValueError: no")
    assert blamed() == (3, "ValueError: no")
    failures[2] = Failure(tmp_path, 1, 100.15, "KeyError: earlier")
    assert blamed() == (2, "KeyError: earlier")
    failures = {0: failures[0]}
    assert blamed() == (0, lost)


# Whole runs.


def run_py(directory: Path, *args: str, nproc: int | None = None, **env: str) -> subprocess.CompletedProcess:
    """The command in a directory; with nproc, under torchrun."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)] if nproc else []
    command = [sys.executable, *torchrun, str(ROOT / "run.py"), *args]
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{TESTS}"} | env
    return subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True, timeout=180)


def only_run(directory: Path) -> Path:
    (run_dir,) = (directory / "runs").iterdir()
    return run_dir


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(
    "how, plan, rank, word",
    [
        ("raise", "tp2", 1, "reading row 16 raised ValueError: planted failure on rank 1 at row 16 (models.py:"),
        ("exit", "tp2", 1, "ended with exit code 3"),
        ("kill", "tp2_pp2", 3, "killed by signal 9"),
    ],
)
def test_a_rank_that_fails_while_training(how, plan, rank, word, tmp_path):
    """C26, on the first stage and on the last rank; the time counts from the last step before it that was written."""
    ran = run_py(tmp_path, *TINY, f"plan={plan}", f"+data.rank={rank}", "+data.after=16", f"+data.how={how}")
    assert ran.returncode == 1
    assert time.time() - (only_run(tmp_path) / "metrics.jsonl").stat().st_mtime < SECONDS_TO_STOP
    assert ran.stderr.count(f"rank {rank} failed") == 1 and word in ran.stderr
    assert "Traceback" not in ran.stderr
    assert ran.stdout.count("step 2/5") == 1 and "step 3/5" not in ran.stdout
    result = json.loads((only_run(tmp_path) / "result.json").read_text())
    assert result["status"] == "failed" and word in result["error"]
    assert_all_gone(only_run(tmp_path))


@pytest.mark.dist
@pytest.mark.slow
def test_a_rank_that_fails_while_the_model_is_built(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import os, models\n"
        "class Net(models.TinyGPT):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        if os.environ.get('RANK') == '1': raise RuntimeError('no memory on this rank')\n"
    )
    ran = run_py(tmp_path, *TINY, "model._target_=mine.Net")
    assert ran.returncode == 1
    assert ran.stderr.count("rank 1 failed") == 1 and "no memory on this rank" in ran.stderr
    assert_all_gone(only_run(tmp_path))


LOSSES = [11.1506565856, 9.7424968977, 8.9230111609, 7.4430283349, 6.9973621078]
NORMS = [4.1771919503, 4.0747527864, 3.7249363182, 3.406054166, 2.9133472982]


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        "plan=pp2",
        "plan=pp2_dp2",
        "plan=pp2 plan.vpp=2 plan.schedule=interleaved_1f1b train.micro_batch_size=1",
        "plan=pp2 plan.vpp=2 plan.schedule=zbv_zero_bubble",
    ],
)
def test_the_loss_on_the_screen_is_the_loss_once_a_step(plan, tmp_path):
    ran = run_py(tmp_path, *TINY, "data._target_=models.FixedRows", *plan.split())
    assert ran.returncode == 0, ran.stderr
    lines = [line for line in ran.stdout.splitlines() if line.startswith("step ")]
    expected = zip(LOSSES, NORMS, strict=True)
    assert [line.split("  ")[:4] for line in lines] == [
        [f"step {step}/5", f"loss {loss:.4f}", f"grad_norm {norm:.4f}", "lr 1.0e-01"]
        for step, (loss, norm) in enumerate(expected, 1)
    ]
    records = [json.loads(line) for line in (only_run(tmp_path) / "metrics.jsonl").read_text().splitlines()]
    assert [record["loss"] for record in records] == pytest.approx(LOSSES, rel=1e-9)
    assert [record["grad_norm"] for record in records] == pytest.approx(NORMS, rel=1e-9)


@pytest.mark.dist
@pytest.mark.slow
def test_torchrun_one_directory_and_one_voice(tmp_path):
    ran = run_py(tmp_path, *TINY, "data._target_=models.FixedRows", nproc=2)
    assert ran.returncode == 0, ran.stderr
    assert [ran.stdout.count(f"step {step}/5  loss") for step in range(1, 6)] == [1] * 5
    run_dir = only_run(tmp_path)
    assert {"config.yaml", "plan.json", "metrics.jsonl", "result.json", ".hydra"} <= set(os.listdir(run_dir))
    losses = [json.loads(line)["loss"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert losses == pytest.approx(LOSSES, rel=1e-9)
    assert json.loads((run_dir / "result.json").read_text())["status"] == "ok"


@pytest.mark.dist
@pytest.mark.slow
def test_torchrun_with_a_wrong_number_of_processes(tmp_path):
    ran = run_py(tmp_path, "plan=tp2", nproc=3)
    assert ran.returncode != 0
    assert ran.stderr.count("WORLD_SIZE=3: torchrun started 3 processes") == 1
    assert "tp 2 x cp 1 x dp 1 x pp 1 = 2" in ran.stderr and "plan.tp=3" in ran.stderr


@pytest.mark.dist
@pytest.mark.slow
def test_torchrun_shows_what_failed_on_a_rank(tmp_path):
    ran = run_py(tmp_path, *TINY, "+data.rank=1", "+data.after=16", nproc=2)
    assert ran.returncode != 0
    root = ran.stderr.partition("Root Cause")[2]
    assert "rank      : 1" in root and root.count("ValueError: planted failure on rank 1") == 1
    assert ran.stderr.count("ValueError: planted failure on rank 1") == 1
