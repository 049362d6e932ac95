"""Compile a plain PyTorch model for tensor, pipeline and data parallelism, and train it: see `python run.py --help`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from meg_compile.config import compose
from meg_compile.errors import Fault, Refused

CONF = Path(__file__).resolve().parent / "conf"
REFUSED, STOPPED = 2, 128


def main(argv: list[str] | None = None) -> int:
    """Runs one command line. Returns the exit code: 0 success, 1 failure, 2 refused, 128 + signal when stopped."""
    from meg_compile.driver import follow
    from meg_compile.runtime.world import join, started_by_torchrun, under_torchrun

    argv = sys.argv[1:] if argv is None else argv
    directory = Path.cwd()
    if str(directory) not in sys.path[:1]:
        sys.path.insert(0, str(directory))
    try:
        if not started_by_torchrun():
            return compose_and_run(argv, directory, None)
        world = join()
        return under_torchrun(follow, world) if world.rank else under_torchrun(compose_and_run, argv, directory, world)
    except KeyboardInterrupt as stop:
        return STOPPED + (stop.args[0] if stop.args else 2)


def compose_and_run(argv: list[str], directory: Path, world: Any) -> int:
    """Lets Hydra compose one job, or with -m several, and runs them."""
    from meg_compile import driver
    from meg_compile.report import sweep

    swept = compose.swept_keys(argv)
    jobs: list[sweep.Job] = []

    @hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
    def job(cfg: DictConfig) -> None:
        context = HydraConfig.get()
        is_sweep = context.mode == RunMode.MULTIRUN
        overrides = [setting.lstrip("+") for setting in compose.typed_settings()]
        varied = [setting for setting in overrides if setting.split("=")[0] in swept]
        if is_sweep:
            print(f"\njob {context.job.num}: {' '.join(varied)}", flush=True)
        plain, faults = compose.composed(cfg)
        if is_sweep and world is not None:
            problem = "every job of a sweep starts its own processes"
            faults.append(Fault("--multirun", None, problem, "run the sweep without torchrun"))
        run_dir = Path(context.runtime.output_dir)
        result = driver.run(plain, faults, run_dir, directory, world)
        jobs.append(sweep.Job(overrides, varied, run_dir, plain.get("plan", {}), result))

    compose.register_resolvers()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # so that Hydra raises what it refuses
    before, sys.argv = sys.argv, [sys.argv[0], *compose.rewrite(argv, CONF)]
    try:
        job()
    except compose.COMPOSITION_ERRORS as error:
        if world is not None:
            world.publish(None)
        print(Refused(compose.composition_fault(error)), file=sys.stderr)
        return REFUSED
    finally:
        sys.argv = before
    codes = {driver.EXIT_CODES[one.result["status"]] for one in jobs}
    if len(jobs) > 1:
        sweep.report(jobs, jobs[0].run_dir.parent)
    return max(codes & {1}, default=max(codes, default=0))


if __name__ == "__main__":
    sys.exit(main())
