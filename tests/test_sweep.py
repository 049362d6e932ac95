"""Sweeps: every job runs whatever happens to the others, and one table shows them all."""

import csv
import json
import sys
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from test_launch import TINY, run_py

import run
from meg_compile import driver
from meg_compile.report.sweep import Job, report

OK = {
    "task": "train",
    "status": "ok",
    "tokens_per_s": 1234.5,
    "loss_last": 2.5,
    "peak_memory_bytes_per_rank": [1, 2**21],
}
REFUSED = {"task": "train", "status": "refused", "error": "This configuration cannot run:\n  plan.tp=3: ..."}
FAILED = {"task": "train", "status": "failed", "error": "rank 1 failed"}


@pytest.fixture
def sweep(tmp_path, monkeypatch, capfd):
    """Sweeps with made-up outcomes: sweep(outcome, *args) -> (exit code, stdout, rows of sweep.json)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    def call(outcome, *args):
        monkeypatch.setattr(driver, "run", lambda plain, faults, *_: outcome(plain, faults))
        code = run.main(["-m", "hydra.sweep.dir=swept", *args])
        return code, capfd.readouterr().out, json.loads(Path("swept/sweep.json").read_text())

    return call


def by_tp(plain, faults):
    return REFUSED if faults else FAILED if plain["plan"]["tp"] == 4 else OK


def test_one_row_a_job_in_order(sweep):
    code, out, rows = sweep(by_tp, "plan.tp=1,2", "plan.pp=1,2", "train.steps=3")
    assert code == 0
    assert [row["overrides"] for row in rows] == [
        f"plan.tp={tp} plan.pp={pp} train.steps=3" for tp in (1, 2) for pp in (1, 2)
    ]
    assert [row["plan"] for row in rows] == ["single", "pp=2", "tp=2", "tp=2 pp=2"]
    assert [job in out for job in ("job 0: plan.tp=1 plan.pp=1\n", "job 3: plan.tp=2 plan.pp=2\n")] == [True, True]


@pytest.mark.parametrize(
    "plans, statuses, exit_code",
    [
        ("tp2,tp3", ["ok", "refused"], 2),
        ("tp3,tp2", ["refused", "ok"], 2),
        ("tp4,tp2", ["failed", "ok"], 1),
        ("tp3,tp4,tp2", ["refused", "failed", "ok"], 1),
    ],
)
def test_a_job_that_goes_wrong_does_not_stop_the_others(plans, statuses, exit_code, sweep):
    code, _, rows = sweep(by_tp, f"plan={plans}")
    assert [row["status"] for row in rows] == statuses
    assert code == exit_code


def test_a_job_that_is_stopped_is_in_the_table(sweep):
    def stop(plain, faults):
        if plain["plan"]["tp"] == 2:
            raise KeyboardInterrupt
        return OK

    code, _, rows = sweep(stop, "plan.tp=1,2,4")
    assert code == 130
    assert [row["status"] for row in rows] == ["ok", "stopped"]


def test_one_job_is_a_sweep_too(sweep):
    code, _, rows = sweep(by_tp, "plan=tp2")
    assert code == 0 and len(rows) == 1


def test_the_table(tmp_path):
    jobs = [
        Job(["plan.tp=2", "train.steps=3"], ["plan.tp=2"], tmp_path / "0", {"tp": 2, "pp": 1}, OK),
        Job(["plan.tp=3", "train.steps=3"], ["plan.tp=3"], tmp_path / "1", {"tp": 3, "pp": 1}, REFUSED),
    ]
    text = StringIO()
    report(jobs, tmp_path, Console(file=text, width=120))
    lines = text.getvalue().splitlines()
    (first,) = [line for line in lines if "plan.tp=2" in line]
    assert [cell.strip() for cell in first.split("│")[1:-1]] == ["0", "plan.tp=2", "tp=2", "1,234", "2", "2.5000", "ok"]
    assert any("plan.tp=3" in line and "refused" in line for line in lines)
    with (tmp_path / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["overrides"], row["status"], row["loss"]) for row in rows] == [
        ("plan.tp=2 train.steps=3", "ok", "2.5"),
        ("plan.tp=3 train.steps=3", "refused", ""),
    ]
    assert rows[1]["error"] == REFUSED["error"]


@pytest.mark.dist
@pytest.mark.slow
def test_jobs_have_ranks_and_directories_of_their_own(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    model = "model._target_=models.TinyGPT data._target_=models.FixedRows experiment=plain_sgd train.check=false"
    code = run.main(
        ["-m", *model.split(), "launch.threads=1", "train.steps=2", "plan=tp2,single", "train.global_batch_size=8,7"]
    )
    out, err = capfd.readouterr()
    assert code == 2, err
    (sweep_dir,) = (tmp_path / "runs").iterdir()
    rows = json.loads((sweep_dir / "sweep.json").read_text())
    assert [row["status"] for row in rows] == ["ok", "refused"] * 2
    assert [rows[0]["loss"], rows[2]["loss"]] == pytest.approx([9.7424968977] * 2, rel=1e-9)
    assert err.count("train.global_batch_size=7: is no multiple") == 2
    results = [json.loads((sweep_dir / str(job) / "result.json").read_text()) for job in range(4)]
    assert [len(result.get("num_parameters_per_rank", [])) for result in results] == [2, 0, 1, 0]
    assert "4 jobs in" in out


@pytest.mark.dist
@pytest.mark.slow
def test_jobs_that_a_launcher_runs_elsewhere_are_in_the_table(tmp_path):
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", exc_type=ImportError)
    settings = "plan=tp2,single train.global_batch_size=8,7 train.steps=2"
    sweep = ["-m", "hydra/launcher=submitit_local", *TINY, "data._target_=models.FixedRows"]
    ran = run_py(tmp_path, *sweep, *settings.split())
    assert ran.returncode == 2, ran.stderr
    (sweep_dir,) = (tmp_path / "runs").iterdir()
    rows = json.loads((sweep_dir / "sweep.json").read_text())
    assert [row["status"] for row in rows] == ["ok", "refused"] * 2
    assert [rows[0]["loss"], rows[2]["loss"]] == pytest.approx([9.7424968977] * 2, rel=1e-9)
    assert "4 jobs in" in ran.stdout
    ran = run_py(tmp_path, *sweep, "hydra.launcher.tasks_per_node=2", "hydra.sweep.dir=two")
    assert ran.returncode == 2 and "in 2 tasks" in (tmp_path / "two" / "sweep.csv").read_text()
