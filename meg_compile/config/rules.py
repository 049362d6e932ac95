"""Values that cannot work: bounds of single settings, and sizes that must agree with each other."""

from __future__ import annotations

import importlib.util
import math
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from meg_compile.config.bounds import bounds
from meg_compile.config.read import Reading
from meg_compile.config.schema import ALONE, WITHOUT_DATA
from meg_compile.config.targets import OWN
from meg_compile.errors import Fault, any_of
from meg_compile.plan import Plan, plan_faults
from meg_compile.schedules import SCHEDULES


@dataclass(frozen=True)
class Here:
    """What this machine and whoever started us give.

    world_size  processes that torchrun started; None where we start our own
    local_size  of these, on this machine
    num_gpus    GPUs on this machine
    """

    world_size: int | None = None
    local_size: int | None = None
    num_gpus: int = 0


def check(reading: Reading, here: Here) -> None:
    """Adds to `reading.faults` whatever the rules below find. A rule whose settings are not sound is skipped."""
    reading.faults += bounds(reading.sound)
    reading.faults += _plan(reading.sound)
    for rule in RULES:
        try:
            faults = rule(reading.sound, here)
        except KeyError:  # a setting that is not sound
            continue
        reading.faults += faults


def _plan(v: Mapping[str, Any]) -> list[Fault]:
    fields = {name: v.get(f"plan.{name}", default) for name, default in vars(Plan()).items()}
    return plan_faults(**fields)


def _sizes(v: Mapping[str, Any]) -> dict[str, int]:
    return {name: v[f"plan.{name}"] for name in ("tp", "cp", "dp", "pp")}


def _batch(v: Mapping[str, Any], here: Here) -> list[Fault]:
    total, micro, dp = v["train.global_batch_size"], v["train.micro_batch_size"], v["plan.dp"]
    if total % (micro * dp) == 0 or v["task"] == "generate":
        return []
    unit = micro * dp
    below = [f"{total // unit * unit}"] if total > unit else []
    fix = f"use train.global_batch_size={' or '.join([*below, str((total // unit + 1) * unit)])}"
    if total % dp == 0:
        fitting = [str(size) for size in range(1, total // dp + 1) if total // dp % size == 0]
        fix += f", or train.micro_batch_size={any_of(fitting)}"
    problem = f"is no multiple of train.micro_batch_size={micro} x plan.dp={dp} = {unit}"
    return [Fault("train.global_batch_size", total, problem, fix)]


def _microbatches(v: Mapping[str, Any], here: Here) -> list[Fault]:
    """What the schedule asks of the number of micro-batches."""
    total, micro, dp, pp = (v[k] for k in ("train.global_batch_size", "train.micro_batch_size", "plan.dp", "plan.pp"))
    schedule, count = SCHEDULES[v["plan.schedule"]], total // (micro * dp)
    if total % (micro * dp) or pp == 1 or v["task"] in ("explain", "generate") or schedule.allows(count, pp):
        return []
    sizes = [str(n * micro * dp) for n in schedule.near(count, pp)]
    fix = f"use train.global_batch_size={any_of(sizes)}"
    others = [s.name for s in SCHEDULES.values() if s.vpp in (None, v["plan.vpp"]) and s.allows(count, pp)]
    if others:
        fix += f", or plan.schedule={any_of(others)}"
    return [Fault("plan.schedule", schedule.name, schedule.why_not(count, pp), fix)]


def _ramp(v: Mapping[str, Any], here: Here) -> list[Fault]:
    """Every size of a global batch that grows must suit the micro-batches, the replicas and the schedule."""
    ramp, full = v["train.batch_ramp"], v["train.global_batch_size"]
    if ramp is None:
        return []
    if set(ramp) != {"start", "increment", "rows"} or min(ramp.values()) < 1:
        problem = "is not start, increment and rows, each a count"
        return [Fault("train.batch_ramp", ramp, problem, "write it as {start: 4, increment: 4, rows: 1000}")]
    unit, pp, schedule = v["train.micro_batch_size"] * v["plan.dp"], v["plan.pp"], SCHEDULES[v["plan.schedule"]]
    if full % unit:
        return []

    def wrong(start: int, increment: int) -> str:
        if start > full or (full - start) % increment:
            return f"does not reach train.global_batch_size={full} from {start} in steps of {increment}"
        for size in range(start, full + 1, increment):
            if size % unit:
                return f"{size} rows are no multiple of train.micro_batch_size x plan.dp = {unit}"
            if pp > 1 and v["task"] not in ("explain", "generate") and not schedule.allows(size // unit, pp):
                return f"at {size} rows plan.schedule={schedule.name} {schedule.why_not(size // unit, pp)}"
        return ""

    if not (problem := wrong(ramp["start"], ramp["increment"])):
        return []
    near = sorted(range(unit, full + 1, unit), key=lambda n: abs(n - ramp["start"]))[:64]
    steps = sorted(range(unit, full + 1, unit), key=lambda n: abs(n - ramp["increment"]))[:64]
    found = ((start, step) for start in near for step in steps if start < full and not wrong(start, step))
    fits = next(found, None)
    fix = f"use train.batch_ramp.start={fits[0]} train.batch_ramp.increment={fits[1]}, or " if fits else "use "
    return [Fault("train.batch_ramp", ramp, problem, f"{fix}train.batch_ramp=null")]


def _processes(v: Mapping[str, Any], here: Here) -> list[Fault]:
    sizes, nproc = _sizes(v), v["launch.nproc"]
    needed = math.prod(sizes.values())
    if v["task"] in ALONE:
        problem = f"task={v['task']} is one process, and torchrun started {here.world_size}"
        many = (here.world_size or 1) > 1
        return [Fault("WORLD_SIZE", here.world_size, problem, "run it without torchrun")] if many else []
    arithmetic = " x ".join(f"{name} {size}" for name, size in sizes.items()) + f" = {needed}"
    faults = []
    if here.world_size not in (None, needed):
        problem = f"torchrun started {here.world_size} processes, and the plan needs {arithmetic}"
        fix = _join(f"start {needed} in all, as by --nproc-per-node {needed}", _fitting(sizes, here.world_size))
        faults.append(Fault("WORLD_SIZE", here.world_size, problem, fix))
    if nproc not in (None, needed):
        fix = _join(f"use launch.nproc={needed} or leave it out", _fitting(sizes, nproc))
        faults.append(Fault("launch.nproc", nproc, f"the plan needs {arithmetic} processes", fix))
    return faults


def _fitting(sizes: Mapping[str, int], nproc: int | None) -> str:
    """One changed size that makes the plan fill `nproc` processes, if there is one."""
    for name in ("dp", "tp", "pp"):
        others = math.prod(size for other, size in sizes.items() if other != name)
        if nproc and nproc % others == 0:
            return f"plan.{name}={nproc // others}"
    return f"plan.tp=1 plan.pp=1 plan.dp={nproc}"


def _devices(v: Mapping[str, Any], here: Here) -> list[Fault]:
    device, wanted = v["launch.device"], here.local_size or math.prod(_sizes(v).values())
    if device != "cuda" or v["task"] in ALONE or here.num_gpus >= wanted:
        return []
    problem = f"{wanted} local ranks need a GPU each, and {here.num_gpus} can be seen here"
    return [Fault("launch.device", device, problem, "use launch.device=cpu, or auto")]


def _optimizer(v: Mapping[str, Any], here: Here) -> list[Fault]:
    name, target = v["optim.name"], v["optim._target_"]
    if name is None and target is None:
        return [Fault("optim.name", "null", "names no optimizer", "use optim.name=adamw, or an optim._target_")]
    if name is not None and target is not None:
        return [
            Fault("optim._target_", target, f"optim.name={name} names an optimizer too", "leave one of the two out")
        ]
    return []


def _learning_rate(v: Mapping[str, Any], here: Here) -> list[Fault]:
    lr, least = v["optim.lr"], v["optim.min_lr"]
    if least > lr:
        return [Fault("optim.min_lr", least, f"is over optim.lr={lr}", f"use {lr} or less")]
    return []


def _schedule(v: Mapping[str, Any], here: Here) -> list[Fault]:
    """Lengths of the parts of a schedule; a verification or an explanation takes fewer steps than are configured."""
    steps, decay, wsd = v["train.steps"], v["optim.decay_steps"], v["optim.wsd_decay_steps"]
    warmup, fraction = v["optim.warmup_steps"], v["optim.warmup_fraction"]
    faults, end = [], steps if decay is None else decay
    if warmup is not None and fraction is not None:
        problem = f"optim.warmup_steps={warmup} says how long warm-up is"
        return [Fault("optim.warmup_fraction", fraction, problem, "set one of the two to null")]
    if fraction is not None and fraction >= 1:
        problem = "is a share of train.steps, so it is under 1"
        return [Fault("optim.warmup_fraction", fraction, problem, "use 0.1, say")]
    if v["task"] != "train":
        return []
    if warmup is not None and warmup > steps:
        fix = f"use {steps} or less, or null for a tenth"
        faults.append(Fault("optim.warmup_steps", warmup, f"is over train.steps={steps}", fix))
    if v["optim.schedule"] == "constant":
        return faults
    first = warmup if warmup is not None else int((0.1 if fraction is None else fraction) * steps)
    if decay is not None and decay <= first:
        problem = f"nothing is left of it after {first} steps of warm-up"
        faults.append(Fault("optim.decay_steps", decay, problem, f"use {first + 1} or more"))
    elif v["optim.schedule"] == "wsd" and wsd is not None and wsd > max(end - first, 0) and not faults:
        problem = f"after {first} steps of warm-up there are {max(end - first, 0)} until step {end}"
        faults.append(Fault("optim.wsd_decay_steps", wsd, problem, f"use {max(end - first, 1)} or less"))
    return faults


def _loss_scale(v: Mapping[str, Any], here: Here) -> list[Fault]:
    scale, precision = v["train.loss_scale"], v["precision"]
    if scale is None or precision == "fp16":
        return []
    problem = f"precision={precision} has the range of gradients, and scales no loss"
    return [Fault("train.loss_scale", scale, problem, "use train.loss_scale=null, or precision=fp16")]


def _betas(v: Mapping[str, Any], here: Here) -> list[Fault]:
    betas = v["optim.betas"]
    if betas is None or v["optim._target_"] is not None:
        return []
    if len(betas) == 2 and all(0 <= beta < 1 for beta in betas):
        return []
    problem = "must be two numbers, each at least 0 and under 1"
    return [Fault("optim.betas", betas, problem, "use optim.betas=[0.9,0.95]")]


def _momentum(v: Mapping[str, Any], here: Here) -> list[Fault]:
    momentum = v["optim.momentum"]
    problem = "a momentum of 1 or more never settles"
    return (
        []
        if momentum is None or momentum < 1
        else [Fault("optim.momentum", momentum, problem, "use optim.momentum=0.9, say")]
    )


def _text(v: Mapping[str, Any], here: Here) -> list[Fault]:
    """Files and vocabulary of our own text dataset. Tasks that run alone read no file."""
    if not v["data._target_"].startswith(f"{OWN}train.data.") or v["task"] in WITHOUT_DATA:
        return []
    faults = []
    for key, what in (("data.path", "text"), ("data.tokenizer", "tokenizer.json")):
        path, may_be_folder = v[key], key == "data.tokenizer"
        if path is not None and not os.path.isfile(path) and not (may_be_folder and os.path.isdir(path)):
            problem = "is a directory, not a file" if os.path.isdir(path) else "there is no such file"
            faults.append(Fault(key, path, problem, f"give a {what} file, from where you typed the command"))
    vocab = v.get("model.vocab_size")
    if v["data.tokenizer"] is None and isinstance(vocab, int) and vocab < 256:
        problem = "text is read byte by byte, and bytes go up to 255"
        faults.append(Fault("model.vocab_size", vocab, problem, "use model.vocab_size=256, or a data.tokenizer"))
    return faults


def _context(v: Mapping[str, Any], here: Here) -> list[Fault]:
    seq_len, context = v["data.seq_len"], v["model.context"]
    if not isinstance(seq_len, int) or not isinstance(context, int) or seq_len <= context:
        return []
    problem = f"is over the model's context of {context}"
    return [Fault("data.seq_len", seq_len, problem, f"use data.seq_len={context} or less, or model.context={seq_len}")]


def _file_above(path: str) -> str:
    """The nearest of the directories above a path that there is, where it is none; "" where all is well."""
    parent = os.path.dirname(path)
    while parent and not os.path.lexists(parent):
        parent = os.path.dirname(parent)
    return "" if os.path.isdir(parent) else parent


def _export(v: Mapping[str, Any], here: Here) -> list[Fault]:
    path = v["export.path"]
    if path is None:
        return []
    is_file = path.endswith(".safetensors")
    if is_file and os.path.isdir(path):
        return [Fault("export.path", path, "is a directory", "name a file in it, such as model.safetensors")]
    if not is_file and os.path.isfile(path):
        return [Fault("export.path", path, "is a file", "name a file NAME.safetensors, or a new folder")]
    if not is_file and os.path.isdir(path) and os.listdir(path):
        return [
            Fault("export.path", path, "is a directory with something in it", "name a new one, or a .safetensors file")
        ]
    if above := _file_above(path):
        return [Fault("export.path", path, f"{above} is a file, not a directory", "choose another place")]
    return []


def _checkpoint(v: Mapping[str, Any], here: Here) -> list[Fault]:
    directory, every, number = (v[f"checkpoint.{name}"] for name in ("dir", "every", "signal"))
    faults = []
    if directory is None and every is not None:
        fix = "add checkpoint.dir=DIR, or leave it out"
        faults.append(Fault("checkpoint.every", every, "there is no directory to save into", fix))
    if directory is not None and os.path.lexists(directory) and not os.path.isdir(directory):
        faults.append(Fault("checkpoint.dir", directory, "is a file, not a directory", "choose another place"))
    if directory is not None and (above := _file_above(directory)):
        faults.append(Fault("checkpoint.dir", directory, f"{above} is a file, not a directory", "choose another place"))
    known = [name for name in ("SIGUSR1", "SIGUSR2", "SIGHUP", "SIGALRM", "SIGCONT") if hasattr(signal, name)]
    if number is not None and number not in known:
        problem = "no such signal to stop by" if not hasattr(signal, number) else "it means something else"
        faults.append(Fault("checkpoint.signal", number, problem, f"use {any_of(known)}, or null for SIGTERM alone"))
    return faults


def _restarts(v: Mapping[str, Any], here: Here) -> list[Fault]:
    """What a run that is to be started again would lack to go on from."""
    count, fix = v["launch.max_restarts"], "use launch.max_restarts=0"
    if count == 0:
        return []
    if v["task"] != "train":
        problem = f"task={v['task']} saves nothing to go on from"
    elif here.world_size is not None:
        problem, fix = "torchrun starts its processes again by itself", f"use torchrun's --max-restarts={count}"
    elif v["checkpoint.dir"] is None:
        problem = "there is no checkpoint to go on from"
        fix = f"add checkpoint.dir=DIR and checkpoint.every=STEPS, or {fix}"
    elif v["checkpoint.resume"] is None:
        problem, fix = "checkpoint.resume=null starts afresh each time", "use checkpoint.resume=auto"
    else:
        return []
    return [Fault("launch.max_restarts", count, problem, fix)]


def _generate(v: Mapping[str, Any], here: Here) -> list[Fault]:
    if v["task"] != "generate":
        return []
    faults, prompts, top_p = [], v["generate.prompts"], v["generate.top_p"]
    if (prompts is None) == (v["generate.file"] is None):
        problem = "there is nothing to go on with" if prompts is None else "generate.file names prompts too"
        fix = """use generate.prompts='["def "]', or generate.file=FILE with a prompt a line"""
        faults.append(Fault("generate.prompts", prompts, problem, fix))
    if top_p is not None and top_p > 1:
        faults.append(Fault("generate.top_p", top_p, "a probability is at most 1", "use 0.9, say"))
    resume = v["checkpoint.resume"]
    if v["init.path"] is None and (resume is None or (resume == "auto" and v["checkpoint.dir"] is None)):
        fix = "add checkpoint.dir=DIR of a run, checkpoint.resume=DIR/step_N, or init.path=FILE"
        faults.append(Fault("checkpoint.dir", None, "no trained weights are named to write with", fix))
    return faults


def _wandb(v: Mapping[str, Any], here: Here) -> list[Fault]:
    project = v["log.wandb"]
    if project is None or v["task"] != "train" or importlib.util.find_spec("wandb"):
        return []
    return [Fault("log.wandb", project, "wandb is not installed", "pip install wandb, or use log.wandb=null")]


def _join(first: str, second: str) -> str:
    return f"{first}, or {second}"


RULES: tuple[Callable[[Mapping[str, Any], Here], list[Fault]], ...] = (
    _batch,
    _microbatches,
    _ramp,
    _processes,
    _devices,
    _optimizer,
    _learning_rate,
    _schedule,
    _loss_scale,
    _betas,
    _momentum,
    _text,
    _context,
    _export,
    _checkpoint,
    _generate,
    _restarts,
    _wandb,
)
