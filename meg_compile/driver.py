"""The tasks: from composed settings to `result.json`, in the process that the user started and in each worker.

- `run`: check everything that needs no process, then explain, eject or start the workers (or be one, under torchrun);
- `worker`: a worker that `run` started;
- `follow`: a rank other than 0 under torchrun, which hears from rank 0 what to work on;
- `work`: what all ranks then do: compile, load their shards, verify or train.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meg_compile.checkpoint.folder import steps_in
from meg_compile.checkpoint.resume import is_named, load_weights
from meg_compile.config import Config, from_dict, load, save
from meg_compile.errors import Exited, Fault, MegError, NotEqual, RankFailed, Refused
from meg_compile.generate import decoding_plan, generate, texts_of
from meg_compile.prepare import (
    build_dataset,
    build_validation,
    compile_program,
    loss_of,
    plain_model,
    prepare,
    starting_weights,
    text_programs,
)
from meg_compile.program import Program
from meg_compile.runtime.decoder import Decoder
from meg_compile.runtime.executor import Executor
from meg_compile.runtime.groups import Groups, init_groups
from meg_compile.runtime.launch import launch
from meg_compile.runtime.watch import Watch
from meg_compile.runtime.world import World, device_type, join
from meg_compile.train.evaluate import Validation, validation_programs
from meg_compile.train.loop import train
from meg_compile.train.rows import seeded_reads
from meg_compile.verify import DropoutOff, Report, verify

EXIT_CODES = {"ok": 0, "failed": 1, "refused": 2, "stopped": 0}
"""By status. A run of ours that is stopped ends with 128 + signal instead; under torchrun it has not failed."""


def run(
    plain: Mapping[str, Any], faults: list[Fault], run_dir: Path, directory: Path, world: World | None = None
) -> dict[str, Any]:
    """One run. Returns what it writes to `result.json`: `task`, `status` (a key of `EXIT_CODES`) and the figures of the
    task, or `error`, which is printed here, once.

    plain      composed settings, with the faults found while composing
    directory  where the command was typed
    world      the processes of torchrun, of which we are rank 0; None to start our own. What goes wrong at work is then
               raised, for torchrun to show
    """
    outcome = {"task": plain.get("task"), "status": "failed"}
    try:
        config, program = prepare(plain, faults, directory, world)
        save(config, run_dir / "config.yaml")
        if config.task != "generate":
            write_json(run_dir / "plan.json", program.to_dict(config.num_microbatches))
        if config.task == "explain":
            return show_plan(config, program, run_dir)
        if config.task == "eject":
            return eject_program(config, program, run_dir)
        processes = "1 process" if config.num_ranks == 1 else f"{config.num_ranks} processes, {program.plan}"
        print(f"{config.task}: {processes}; run directory {run_dir}", flush=True)
        several = config.num_microbatches * config.plan.dp > 1
        if config.task == "train" and program.units.unclear and several and not config.train.check:
            unknown = f"whether the loss of a micro-batch sees only its own rows is not known: {program.units.unclear}"
            print(f"warning: {unknown}; train.check=true compares a step", file=sys.stderr, flush=True)
        write_json(run_dir / "result.json", outcome | {"error": "it ended before it was done"})
        if world is None:
            return run_workers(config, run_dir)
        world.publish({"run_dir": str(run_dir), "config": config.to_dict()})
        return work(config, run_dir, world)
    except Refused as error:
        if world is not None:
            world.publish(None)
        outcome |= {"status": "refused", "error": str(error)}
    except KeyboardInterrupt:
        saved = has_saved(run_dir)
        if not saved:
            write_json(run_dir / "result.json", outcome | {"status": "stopped"})
        print(f"stopped{saved}; no process is left", file=sys.stderr, flush=True)
        raise
    except (Exception, SystemExit) as error:
        error = Exited(error) if isinstance(error, SystemExit) else error
        outcome["error"] = str(error) if isinstance(error, MegError) else traceback.format_exc()
        if world is not None:  # torchrun shows what it was
            write_json(run_dir / "result.json", outcome)
            raise error
    print(outcome["error"], file=sys.stderr, flush=True)
    write_json(run_dir / "result.json", outcome)
    return outcome


def show_plan(config: Config, program: Program, run_dir: Path) -> dict[str, Any]:
    """Prints the plan, and keeps it in `explain.txt`. Starts no process."""
    text = program.explain(config.num_microbatches, config.explain.block)
    print(text, flush=True)
    path = config.data.args.get("path")
    if isinstance(path, str) and not Path(path).exists() and not Path(f"{path}.idx").exists():
        print(f"note: data.path={path} is not there; task=explain reads no data", file=sys.stderr)
    (run_dir / "explain.txt").write_text(text + "\n")
    result = {"task": "explain", "status": "ok", "plan": config.to_dict()["plan"], "num_ranks": config.num_ranks}
    write_json(run_dir / "result.json", result)
    return result


def eject_program(config: Config, program: Program, run_dir: Path) -> dict[str, Any]:
    """Writes the program as source that runs with torch alone, into `ejected/`. Starts no process."""
    folder = run_dir / "ejected"
    program.eject(folder, config.num_microbatches)
    print(f"ejected {program.plan}: {folder}; its README.md says how to run it", flush=True)
    result = {"task": "eject", "status": "ok", "plan": config.to_dict()["plan"], "num_ranks": config.num_ranks}
    result["path"] = str(folder)
    write_json(run_dir / "result.json", result)
    return result


def run_workers(config: Config, run_dir: Path) -> dict[str, Any]:
    """Starts the workers, waits for them and returns what rank 0 wrote; when one fails, again, up to
    `launch.max_restarts` times.

    RankFailed if one of them failed. KeyboardInterrupt with the signal by which they were stopped.
    """
    nproc = config.num_ranks
    device = device_type(config.launch.device, nproc)
    saves = config.task == "train" and config.checkpoint.dir is not None
    warning = config.checkpoint.signal if saves else None
    threads, restarts = config.launch.threads, config.launch.max_restarts
    start = partial(launch, "meg_compile.driver:worker", nproc, run_dir, device, threads, saves=saves, warning=warning)
    metrics = run_dir / "metrics.jsonl"
    for attempt in range(restarts + 1):
        before = metrics.stat().st_mtime_ns if metrics.exists() else None
        try:
            start(again=attempt > 0)
            break
        except RankFailed as failed:
            trained = metrics.exists() and metrics.stat().st_mtime_ns != before
            if attempt == restarts or (failed.comes_again and not trained):
                raise
            print(f"{failed}\nrestart {attempt + 1} of {restarts}", file=sys.stderr, flush=True)
            if config.checkpoint.dir is not None and steps_in(Path(config.checkpoint.dir)):
                config.checkpoint.resume = "auto"  # where one was named, it was that of the first attempt
                save(config, run_dir / "config.yaml")
    result = json.loads((run_dir / "result.json").read_text())
    if "error" in result:  # every process ended with 0, as by os._exit(0)
        raise MegError(f"the processes ended before the run was done; see {run_dir / 'logs'}")
    if result["status"] == "stopped":  # the signal reached a worker alone
        raise KeyboardInterrupt(result["signal"])
    return result


def has_saved(run_dir: Path) -> str:
    """Where the run that was stopped left a checkpoint: words behind "stopped"."""
    try:
        result = json.loads((run_dir / "result.json").read_text())
    except (OSError, ValueError):
        return ""
    return f", saved in {result['checkpoint']}" if result["status"] == "stopped" and result.get("checkpoint") else ""


def worker(run_dir: Path) -> None:
    """A worker that `launch` started."""
    work(load(run_dir / "config.yaml"), run_dir, join())


def follow(world: World) -> int:
    """A rank other than 0 under torchrun. Returns its exit code; it prints nothing."""
    heard = world.hear()
    if heard is None:
        return EXIT_CODES["refused"]
    return EXIT_CODES[work(from_dict(heard["config"]), Path(heard["run_dir"]), world)["status"]]


def work(config: Config, run_dir: Path, world: World) -> dict[str, Any]:
    """One rank of a run. Returns its figures; rank 0 writes them to `result.json`."""
    if config.launch.threads:
        torch.set_num_threads(config.launch.threads)
    kind = device_type(config.launch.device, world.local_size)
    device = torch.device(kind, world.local_rank) if kind == "cuda" else torch.device(kind)
    plan = decoding_plan(config) if config.task == "generate" else config.plan.plan()
    with Watch(world.store, world.rank, world.size, config.launch.timeout, run_dir):
        world.init_process_group(device)
        groups = init_groups(plan.mesh, kind)
        result = do_task(config, run_dir, groups, device)
        if world.rank == 0:
            write_json(run_dir / "result.json", result)
    dist.destroy_process_group()
    return result


def do_task(config: Config, run_dir: Path, groups: Groups, device: torch.device) -> dict[str, Any]:
    """The figures of a task that ranks work on."""
    if config.task == "generate":
        return write_texts(config, groups, device, run_dir)
    dataset = build_dataset(config)
    if config.task == "verify":
        report, *_ = compare(config, groups, device, dataset, steps=config.verify.steps, update=True)
        result = {"task": "verify", "plan": config.to_dict()["plan"]} | report.to_dict()
        if groups.rank == 0:
            report.show()
        return result
    program, executor = loaded_program(config, groups, device, dataset)
    validation = validation_of(config, program, executor, groups)
    return train(config, program, executor, groups, dataset, run_dir, validation)


def write_texts(config: Config, groups: Groups, device: torch.device, run_dir: Path) -> dict[str, Any]:
    """task=generate on one rank."""
    texts = texts_of(config)
    programs, total = text_programs(config, texts)
    decoder = Decoder(programs, groups, device, total)
    if is_named(config.checkpoint):
        decoder.load()
        load_weights(config, decoder.executor)
    else:
        decoder.load(starting_weights(config, programs[0]))
    decoder.copy()
    return generate(config, texts, decoder, groups, run_dir)


def loaded_program(config: Config, groups: Groups, device: torch.device, dataset: Any) -> tuple[Program, Executor]:
    """The program to train, with its starting weights; after one step against the plain model, if `train.check`.

    NotEqual where that step differs. With dropout=fast the check runs without it; a model that has any is compiled
    again after it.
    """
    if config.train.check:
        report, program, executor, is_same = compare(config, groups, device, dataset, steps=1, update=False)
        if groups.rank == 0:
            worst, verdict = report.worst(1)[0], "equal" if report.ok else "NOT EQUAL"
            figures = f"largest relative error {worst.error:.1e}, allowed {worst.tolerance:.0e}"
            print(f"one step against the plain model: {verdict} ({figures})", flush=True)
        if not report.ok:
            if groups.rank == 0:
                report.show()
            raise NotEqual("the compiled program does not compute what the plain model computes; nothing was trained")
        if is_same:
            executor.seed(config.train.seed)
            return program, executor
    program = compile_program(config, dataset)
    executor = Executor(program, groups, device, config.train.seed, compiled=config.compile)
    executor.load(starting_weights(config, program))
    executor.seed(config.train.seed)
    return program, executor


def validation_of(config: Config, program: Program, executor: Executor, groups: Groups) -> Validation | None:
    """What `eval` asks for. Generators are left as they were."""
    if config.eval.every is None:
        return None
    with seeded_reads():
        dataset = build_validation(config)
        programs = validation_programs(config, program, dataset)
    return Validation(config, executor, groups, dataset, programs)


def compare(
    config: Config, groups: Groups, device: torch.device, dataset: Any, *, steps: int, update: bool
) -> tuple[Report, Program, Executor, bool]:
    """Verifies `steps` steps: (report, program, executor, whether it is the program to train).

    It is not where dropout had to be off, since dropout=fast cannot be compared with anything.
    """
    off = DropoutOff() if config.dropout == "fast" else None
    with off or nullcontext():
        program = compile_program(config, dataset)
        executor = Executor(program, groups, device, config.train.seed, compiled=config.compile)
        executor.load(starting_weights(config, program))
        factory, loss = (lambda: plain_model(config, program)), loss_of(config)
        report = verify(config, program, executor, groups, factory, loss, dataset, steps=steps, update=update)
    return report, program, executor, off is None or off.num_switched_off == 0


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Writes a file that is there whole or not at all."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value, indent=2) + "\n")
    part.replace(path)
