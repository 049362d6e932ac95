"""Compile a plain PyTorch model for tensor, pipeline and data parallelism, and train it: see `python run.py --help`."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

if __name__ == "__main__" and sys.stderr.isatty():  # what is imported next takes seconds
    print("meg_compile: starting", file=sys.stderr, flush=True)

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from meg_compile import driver
from meg_compile.config import compose
from meg_compile.config.help import describe_settings
from meg_compile.errors import Fault, Refused
from meg_compile.report import sweep
from meg_compile.runtime.world import World, join, started_by_torchrun, under_torchrun

CONF = Path(__file__).resolve().parent / "conf"


def main(argv: list[str] | None = None) -> int:
    """Runs one command line. Returns the exit code: 0 success, 1 failure, 2 refused, 128 + signal when stopped."""
    argv = sys.argv[1:] if argv is None else argv
    directory = Path.cwd()
    if sys.path[0] != str(directory):
        sys.path.insert(0, str(directory))
    try:
        if not started_by_torchrun():
            return compose_and_run(argv, directory, None)
        world = join()
        if world.rank:
            return under_torchrun(driver.follow, world)
        return under_torchrun(compose_and_run, argv, directory, world)
    except KeyboardInterrupt as stop:
        return 128 + (stop.args[0] if stop.args else 2)


def compose_and_run(argv: list[str], directory: Path, world: World | None) -> int:
    """Lets Hydra compose the job, or with -m the jobs, and runs each. Returns the exit code."""
    swept = compose.swept_keys(argv)
    jobs: list[sweep.Job] = []
    ours: list[Exception] = []
    here = os.getpid()

    @hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
    def job(cfg: DictConfig) -> None:
        try:
            run_job(cfg)
        except Exception as error:
            ours.append(error)
            raise

    def run_job(cfg: DictConfig) -> None:
        context = HydraConfig.get()
        settings = [setting.lstrip("+") for setting in compose.typed_settings()]
        varied = [setting for setting in settings if setting.split("=")[0] in swept]
        plain, faults = compose.composed(cfg)
        if context.mode == RunMode.MULTIRUN:
            print(f"\njob {context.job.num}: {' '.join(varied)}", flush=True)
            if world is not None:
                problem = "every job of a sweep starts its own processes"
                faults.append(Fault("--multirun", None, problem, "run the sweep without torchrun"))
            if (tasks := compose.num_tasks()) > 1:
                problem = f"it would run the whole job in {tasks} tasks, and every job starts its own processes"
                fix = "use hydra.launcher.nodes=1 hydra.launcher.tasks_per_node=1, or torchrun for many machines"
                faults.append(Fault("hydra.launcher", None, problem, fix))
        run_dir = Path(context.runtime.output_dir)
        plan = plain.get("plan")
        result = {"status": "stopped"}
        try:
            result = driver.run(plain, faults, run_dir, directory, world)
        except KeyboardInterrupt:
            if os.getpid() == here:
                raise  # in a process of its own a job that is stopped ends as any other
        finally:
            jobs.append(sweep.Job(settings, varied, run_dir, plan if isinstance(plan, dict) else {}, result))
        if result["status"] == "refused" and context.mode != RunMode.MULTIRUN:
            _remove(run_dir)

    compose.register_resolvers()
    compose.Sweeps.directories.clear()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # so that Hydra raises what it refuses
    before, sys.argv = sys.argv, [sys.argv[0], *compose.rewrite(argv, CONF)]
    try:
        job()
    except Exception as error:
        if error in ours:
            raise
        if jobs_elsewhere(swept):
            print(f"the launcher of the jobs failed: {error}", file=sys.stderr)
            return 1
        faults = compose.unnamed_presets(argv, CONF) or [compose.composition_fault(error)]
        print(Refused(faults), file=sys.stderr)
        return driver.EXIT_CODES["refused"]
    finally:
        if compose.asks_for_help(argv):
            print(describe_settings())
        sys.argv = before
        if world is not None and not jobs:
            world.publish(None)  # nothing to do, so that the other ranks do not wait for it
        jobs = jobs or jobs_elsewhere(swept)
        for sweep_dir in compose.Sweeps.directories if jobs else ():
            sweep.report(jobs, directory / sweep_dir)
    codes = {driver.EXIT_CODES[one.result["status"]] for one in jobs}
    return 1 if 1 in codes else max(codes, default=0)


def jobs_elsewhere(swept: set[str]) -> list[sweep.Job]:
    """The jobs of a sweep whose launcher ran them in other processes, as they left them on disk."""
    found = []
    for one in (job for sweep_dir in compose.Sweeps.directories for job in compose.jobs_in(sweep_dir)):
        varied = [setting for setting in one.settings if setting.split("=")[0] in swept]
        path = one.run_dir / "result.json"
        result = json.loads(path.read_text()) if path.exists() else {"status": "failed", "error": "it left no result"}
        found.append(sweep.Job(one.settings, varied, one.run_dir, one.plain.get("plan") or {}, result))
    return found


def _remove(run_dir: Path) -> None:
    """The directory of a run that was refused, unless there is something else in it."""
    (run_dir / "result.json").unlink(missing_ok=True)
    shutil.rmtree(run_dir / ".hydra", ignore_errors=True)
    for path in (run_dir, run_dir.parent):
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()


if __name__ == "__main__":
    sys.exit(main())
