"""What a trainer gives to a checkpoint and takes from it.

`model.NAME` is a parameter or buffer by the user's name, `optim.NAME.WHAT` what the optimizer keeps for it,
`generator.R` and `generator.R.tp` the random streams of rank R, which mean something to the same plan only.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from meg_compile.checkpoint.files import CODES, DTYPES
from meg_compile.checkpoint.pieces import Held, held_part, held_whole
from meg_compile.checkpoint.storage import Index, LoadPlanner, Reader
from meg_compile.errors import MegError
from meg_compile.program import ParamSpec, Program

MODEL, OPTIMIZER, GENERATOR = "model.", "optim.", "generator."


def saved_specs(program: Program) -> dict[str, ParamSpec]:
    """The parameters and buffers that a checkpoint holds: those of the model's state_dict."""
    return {name: spec for name, spec in program.params.items() if spec.persistent}


def tensors_of(trainer: Any) -> dict[str, Held]:
    """All that this rank holds. The random streams are copies, all else is what training changes."""
    executor, rank = trainer.executor, trainer.groups.rank
    found = _model_of(executor)
    for name, parameter in executor.parameters.items():
        for what, value in _moments(trainer.optimizer, parameter).items():
            found[f"{OPTIMIZER}{name}.{what}"] = _moment(trainer, name, what, value)
    default, sharded = streams(executor)
    found[f"{GENERATOR}{rank}"] = held_whole(default)
    found[f"{GENERATOR}{rank}.tp"] = held_whole(sharded)
    return found


def streams(executor: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The states of the two generators that dropout=fast draws from, for whole values and for this rank's shards."""
    return executor.rng.generator().get_state(), executor.rng.state


def counters_of(trainer: Any, step: int, config: Any) -> dict[str, Any]:
    """All that is no tensor, after `step` steps."""
    settings = config.to_dict()
    return {
        "format": 1,
        "step": step,
        "rows": trainer.batches.consumed(step),
        "dataset_rows": trainer.batches.num_rows,
        "skipped": trainer.num_skipped,
        "loss_scale": trainer.scale.state(),
        "optimizer": type(trainer.optimizer).__name__,
        "plan": settings["plan"],
        "device": trainer.executor.device.type,
        "config": settings,
    }


def take(trainer: Any, reader: Reader, state: dict[str, Any], settings: dict[str, Any]) -> None:
    """Make a trainer what the one was that gave a checkpoint. All ranks call this; the model's tensors fit.

    settings: this run's. Under another plan than the checkpoint's the random streams of dropout=fast start anew.
    MegError, before anything is changed, where the optimizer's do not fit.
    """
    executor = trainer.executor
    make_moments(trainer)
    wanted = tensors_of(trainer)
    untouched = _without_moments(trainer, reader.index)
    refuse_any(_misfits(trainer, wanted, untouched, reader.index, state["optimizer"]))
    for parameter, names in untouched.items():
        del trainer.optimizer.state[parameter]
        wanted = {name: held for name, held in wanted.items() if name not in names}
    default, sharded = (name for name in wanted if name.startswith(GENERATOR))
    same = state["plan"] == settings["plan"] and state["device"] == executor.device.type
    kept = [wanted[name].pieces[torch.Size([0])] for name in (default, sharded)]
    if not same:
        del wanted[default], wanted[sharded]
    with torch.no_grad():
        dcp.load(wanted, storage_reader=reader, planner=LoadPlanner(), no_dist=not dist.is_initialized())
    if same:
        executor.rng.generator().set_state(kept[0])
        executor.rng.state = kept[1]
    else:
        executor.seed(trainer.seed, state["step"])
    trainer.batches.resume(state["step"], state["rows"])
    trainer.num_skipped = state["skipped"]
    trainer.scale.load(state["loss_scale"])


def take_weights(executor: Any, reader: Reader) -> None:
    """Give an executor the model of a checkpoint that fits. All ranks call this."""
    wanted = _model_of(executor)
    with torch.no_grad():
        dcp.load(wanted, storage_reader=reader, planner=LoadPlanner(), no_dist=not dist.is_initialized())


def make_moments(trainer: Any) -> None:
    """What an optimizer keeps is made at its first step: take one that moves nothing, parameter by parameter."""
    optimizer = trainer.optimizer
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.zero_grad()
    for parameter in trainer.executor.parameters.values():
        parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        parameter.grad = None
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def refuse_any(problems: list[str]) -> None:
    """MegError, on every rank, for what any of them found. All ranks call this."""
    every: list[Any] = [problems]
    if dist.is_initialized():
        every = [None] * dist.get_world_size()
        dist.all_gather_object(every, problems)
    if found := list(dict.fromkeys(problem for of_rank in every for problem in of_rank)):
        raise MegError("\n  ".join(["this checkpoint does not fit:", *shortened(found)]))


def shortened(problems: list[str], most: int = 10) -> list[str]:
    return problems if len(problems) <= most else [*problems[:most], f"and {len(problems) - most} more"]


def _without_moments(trainer: Any, index: Index) -> dict[nn.Parameter, list[str]]:
    """The parameters of which the checkpoint has no moments, since no gradient ever reached them, with their names."""
    found = {}
    for name, parameter in trainer.executor.parameters.items():
        names = [f"{OPTIMIZER}{name}.{what}" for what in _moments(trainer.optimizer, parameter)]
        if names and not any(one in index for one in names):
            found[parameter] = names
    return found


def _misfits(
    trainer: Any, wanted: dict[str, Held], untouched: dict[nn.Parameter, list[str]], index: Index, optimizer: str
) -> list[str]:
    kind = type(trainer.optimizer).__name__
    if optimizer != kind:
        return [f"it has the state of {optimizer}, and this run's optimizer is {kind}"]
    absent = {name for names in untouched.values() for name in names}
    found = []
    for name, held in wanted.items():
        if name.startswith(OPTIMIZER) and name not in absent:
            found += misfit(name, held.shape, held.dtype, index)
    own = {f"{OPTIMIZER}{name}." for name in trainer.executor.parameters}
    for name in index:
        if name.startswith(OPTIMIZER) and name not in wanted and f"{name.rpartition('.')[0]}." in own:
            found.append(f"it has {name}, which this run does not keep")
    return found


def misfit(name: str, shape: Any, dtype: torch.dtype, index: Index) -> list[str]:
    """How a tensor differs from what the checkpoint has under its name."""
    entry = index.get(name)
    if entry is None:
        return [f"{name} is not in it"]
    if tuple(entry["shape"]) != tuple(shape):
        return [f"{name} is {entry['shape']} in it, and {list(shape)} here"]
    return [] if DTYPES[entry["dtype"]] == dtype else [f"{name} is {entry['dtype']} in it, and {CODES[dtype]} here"]


def _moments(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, Any]:
    return {what: value for what, value in optimizer.state.get(parameter, {}).items() if value is not None}


def _moment(trainer: Any, name: str, what: str, value: Any) -> Held:
    parameter = trainer.executor.parameters[name]
    if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
        return _held(trainer.executor, trainer.executor.specs[name], value)
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return held_whole(value)
    kind = type(trainer.optimizer).__name__
    raise MegError(f"checkpoints hold what is laid out like a parameter, or one number; {kind}'s {what} is neither")


def _model_of(executor: Any) -> dict[str, Held]:
    own = {name: spec for name, spec in saved_specs(executor.program).items() if name in executor.specs}
    return {f"{MODEL}{name}": _held(executor, spec, executor.tensors[name]) for name, spec in own.items()}


def _held(executor: Any, spec: ParamSpec, tensor: torch.Tensor) -> Held:
    at, dp, row = executor.groups.coords, executor.program.plan.dp, None
    if spec.name in executor.split:
        row = min(at.dp * -(-spec.local_shape[0] // dp), spec.local_shape[0])
    return held_part(spec, tensor.detach(), at.tp, row)
