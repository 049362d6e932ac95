"""Where a run goes on: which checkpoint it takes, why it passes others over, and whether it fits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from meg_compile.checkpoint.folder import damage, manifest_of, name_of, remove_leftovers, steps_in
from meg_compile.checkpoint.state import MODEL, misfit, saved_specs, shortened, take
from meg_compile.checkpoint.storage import Index, Reader
from meg_compile.errors import Fault, MegError, Refused
from meg_compile.program import Program

SMALL = ("index.json", "state.json")
APART = ("plan", "checkpoint", "launch", "export", "explain", "verify", "task", "train.steps", "train.check")
"""Settings that may differ without a word."""


class Found(NamedTuple):
    """A checkpoint: its files (name -> size and hash), the index of its tensors, and what is no tensor."""

    path: Path
    files: dict[str, Any]
    index: Index
    state: dict[str, Any]


def look_at(path: Path) -> Found:
    """A checkpoint by its small files. ValueError that says what is wrong with it."""
    files = manifest_of(path)
    if problems := damage(path, files, SMALL):
        raise ValueError("; ".join(shortened(problems)))
    index, state = (json.loads((path / name).read_bytes()) for name in SMALL)
    if strangers := {p["file"] for entry in index.values() for p in entry["pieces"]} - files.keys():
        raise ValueError(f"index.json names {', '.join(sorted(strangers))}, of which the manifest says nothing")
    return Found(path, files, index, state)


def candidates(settings: Any) -> list[Path]:
    """The checkpoints that `checkpoint.resume` allows, best first. settings: the section `checkpoint`."""
    if settings.resume is None or (settings.resume == "auto" and settings.dir is None):
        return []
    if settings.resume != "auto":
        return [Path(settings.resume)]
    return [Path(settings.dir) / name_of(step) for step in reversed(steps_in(Path(settings.dir)))]


def resume_faults(config: Any, program: Program) -> list[Fault]:
    """What is wrong with going on as `config.checkpoint` says, as far as the small files show; no process is needed."""
    settings, chosen = config.checkpoint, None
    for path in candidates(settings):
        try:
            chosen = look_at(path)
            break
        except (ValueError, OSError) as error:
            if settings.resume != "auto":
                return [Fault("checkpoint.resume", path, str(error), _other(path))]
    if settings.dir is not None and settings.resume != "auto":
        start = chosen.state["step"] if chosen else 0
        if newer := [name_of(step) for step in steps_in(Path(settings.dir)) if step > start]:
            problem = f"it holds {', '.join(newer[:5])} already, which this run would be mistaken for"
            fix = "use another directory, or checkpoint.resume=auto to go on from the latest"
            return [Fault("checkpoint.dir", settings.dir, problem, fix)]
    return misfits(config, program, chosen) if chosen else []


def restart_faults(config: Any, is_under_torchrun: bool) -> list[Fault]:
    """What a run that is to be started again would lack to go on from."""
    count, settings, fix = config.launch.max_restarts, config.checkpoint, "use launch.max_restarts=0"
    if count == 0:
        return []
    if config.task != "train":
        problem = f"task={config.task} saves nothing to go on from"
    elif is_under_torchrun:
        problem, fix = "torchrun starts its processes again by itself", f"use torchrun's --max-restarts={count}"
    elif settings.dir is None:
        problem = "there is no checkpoint to go on from"
        fix = f"add checkpoint.dir=DIR and checkpoint.every=STEPS, or {fix}"
    elif settings.resume is None:
        problem, fix = "checkpoint.resume=null starts afresh each time", "use checkpoint.resume=auto"
    else:
        return []
    return [Fault("launch.max_restarts", count, problem, fix)]


def misfits(config: Any, program: Program, found: Found) -> list[Fault]:
    """How a checkpoint differs from what this configuration trains."""
    step, problems = found.state["step"], []
    specs = saved_specs(program)
    for name, spec in specs.items():
        problems += misfit(f"{MODEL}{name}", spec.shape, spec.held, found.index)
    for name in found.index:
        if name.startswith(MODEL) and name.removeprefix(MODEL) not in specs:
            problems.append(f"it has {name}, which this model does not have")
    if problems:
        fix = "use another checkpoint.dir, or the model and precision that it is of"
        return [Fault("checkpoint", found.path, "does not fit: " + "; ".join(shortened(problems)), fix)]
    if step > config.train.steps:
        problem = f"{found.path} is of step {step} already"
        return [Fault("train.steps", config.train.steps, problem, f"use train.steps={step} or more")]
    return []


def resume(config: Any, trainer: Any) -> Found | None:
    """Let a trainer go on from where `config.checkpoint` says; None where it starts afresh. All ranks call this.

    Every byte of the checkpoint is checked first, the files shared out among the ranks. Rank 0 says what is taken and
    what is passed over. Refused, on every rank, for what `resume_faults` refuses; MegError where all that is there is
    damaged, or the optimizer's state does not fit.
    """
    settings, rank = config.checkpoint, trainer.groups.rank
    say = print if rank == 0 else lambda *_, **__: None
    if settings.dir is not None:
        for name in _from_first(lambda: remove_leftovers(Path(settings.dir)) if rank == 0 else []):
            say(f"checkpoint: {name} is passed over: it was not finished", flush=True)
    passed = []
    for path in _from_first(lambda: candidates(settings)):
        found, problem = _from_first(lambda path=path: _looked_at(path))
        problem = problem or _damage_in_depth(found, rank)
        if problem:
            passed.append(f"{path.name}: {problem}")
            say(f"checkpoint: {path} is passed over: {problem}", flush=True)
            continue
        if faults := _from_first(lambda f=found: misfits(config, trainer.program, f)):
            raise Refused(faults)
        take(trainer, Reader(path, found.index), found.state, config.to_dict())
        say(f"checkpoint: goes on from {path}", flush=True)
        if changed := changes(found.state["config"], config.to_dict()):
            say(f"checkpoint: with other settings than before: {', '.join(changed)}", flush=True)
        if (now := trainer.batches.num_rows) != (was := found.state["dataset_rows"]):
            say(f"checkpoint: the data has {now} rows, and had {was}: some may be read again, or late", flush=True)
        return found
    if passed:
        fix = "use another checkpoint.dir to start afresh"
        raise MegError(f"no checkpoint is good: {'; '.join(passed)}; {fix}")
    return None


def changes(before: Any, now: Any, prefix: str = "") -> list[str]:
    """The settings whose values differ, as "optim.lr=0.2 (was 0.1)"."""
    found = []
    for key in sorted({*before, *now}):
        name, old, new = f"{prefix}{key}", before.get(key), now.get(key)
        if name in APART or old == new:
            continue
        both = isinstance(old, dict) and isinstance(new, dict)
        found += changes(old, new, f"{name}.") if both else [f"{name}={new} (was {old})"]
    return found


def _looked_at(path: Path) -> tuple[Found | None, str]:
    try:
        return look_at(path), ""
    except (ValueError, OSError) as error:
        return None, str(error)


def _damage_in_depth(found: Found, rank: int) -> str:
    """What is wrong with a checkpoint's files, of which each rank reads its share."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    mine = sorted(found.files)[rank::world]
    try:
        problems = damage(found.path, {name: found.files[name] for name in mine}, mine)
    except OSError as error:
        problems = [f"{error.filename or found.path} cannot be read: {error.strerror}"]
    every: list[Any] = [problems] * world
    if world > 1:
        dist.all_gather_object(every, problems)
    return "; ".join(shortened([problem for of_rank in every for problem in of_rank]))


def _from_first(make: Callable[[], Any]) -> Any:
    """What rank 0 makes, on every rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return make()
    made = [make() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(made)
    return made[0]


def _other(path: Path) -> str:
    inside = [name_of(step) for step in steps_in(path)] or [name_of(step) for step in steps_in(path.parent)]
    others = [name for name in inside if name != path.name]
    return f"there are {', '.join(others[-5:])}" if others else "use checkpoint.resume=auto, or null to start afresh"
