"""The loss over validation rows while a model trains, on the weights of its executor and with no effect on training.

The rows are read in order, in micro-batches, which the replicas share; the last one may be short. Each goes through the
model as it is in evaluation, forward alone, so any number of them suits any plan. The mean is over all that counts in
the rows, whatever micro-batch it is in, and so the plain model's over all rows at once.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import lcm
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meg_compile.config.targets import Target, TargetError, check_target, locate
from meg_compile.errors import Fault, MegError, Refused
from meg_compile.program import Program
from meg_compile.runtime.executor import Executor
from meg_compile.runtime.groups import Groups
from meg_compile.runtime.zero import rows as rows_of_replica
from meg_compile.schedules import SCHEDULES
from meg_compile.train.agree import agree_on
from meg_compile.train.batches import DTYPES, checksum, read_rows
from meg_compile.train.rows import example, fold, num_rows, seeded_reads


def validation_target(config: Any) -> Target:
    """The validation dataset: that of training with `part=valid`, or with what `eval.data` changes about it.

    A dataset of its own is read whole where it does not say otherwise. Refused where the class takes no `part`, and for
    arguments that it does not take.
    """
    data, given = config.data, dict(config.eval.data or {})
    target = given.pop("_target_", data.target)
    args = (data.args if target == data.target else {}) | given
    if config.eval.data is None:
        if not _takes(target, "part"):
            problem = f"{target} has no argument `part` that could be valid"
            fix = "name other data by eval.data={path: ...}, as the arguments that differ, with a _target_ or not"
            raise Refused(Fault("eval.data", "null", problem, fix))
        args |= {"part": "valid"}
    elif not {"part", "split"} & given.keys() and _takes(target, "split"):
        args |= {"part": "train", "split": [1]}
    args, faults = check_target("eval.data", {"_target_": target, **args})
    if faults:
        raise Refused(faults)
    return Target(target, args)


def _takes(target: str, name: str) -> bool:
    try:
        return name in inspect.signature(locate(target)).parameters
    except (TargetError, TypeError, ValueError):
        return False


def num_validation_rows(config: Any, dataset: Any) -> int:
    """How many rows are read each time. Refused where there are none."""
    found, batches = num_rows(dataset), config.eval.batches
    if not found:
        raise Refused(Fault("eval.data", type(dataset).__name__, "it has no rows", "use more data"))
    return found if batches is None else min(found, batches * config.train.global_batch_size)


def validation_programs(config: Any, program: Program, dataset: Any) -> dict[int, Program]:
    """The model in evaluation for each size of a micro-batch that is met: the usual one, and a short last one.

    Generators are left as they were. Refused as by `compile`, where the loss of many rows is no mean, and where other
    ranks would hold the weights.
    """
    if program.units.coupled:
        problem = f"the loss couples the rows of a batch ({program.units.coupled}), and has no mean over more"
        raise Refused(Fault("eval.every", config.eval.every, problem, "use eval.every=null"))
    num, size = num_validation_rows(config, dataset), config.train.micro_batch_size
    made = {}
    for rows in {min(size, num): None, num % size: None}:
        if rows:
            inputs = example(dataset, rows, config.data.fields, DTYPES[config.precision])
            with seeded_reads():
                torch.default_generator.manual_seed(config.train.seed)
                try:
                    made[rows] = _forward_only(program.variant(inputs))
                except MegError as error:
                    if isinstance(error, Refused):
                        raise
                    fix = "use rows of the training data's lengths"
                    raise Refused(Fault("eval.data", type(dataset).__name__, str(error), fix)) from error
    return made


def _forward_only(program: Program) -> Program:
    """With a schedule for any number of micro-batches, of whole weights."""
    plan = program.plan
    loop = "looped_bfs" if plan.vpp > 1 else "gpipe"
    schedule = loop if SCHEDULES[plan.schedule].placement == "loop" else "zbv_zero_bubble"
    return replace(program, plan=replace(plan, zero=0, schedule=schedule))


class Validation:
    """`measure()` gives the loss over the validation rows, the same on every rank, all of which must call it.

    programs: what `validation_programs` gave.
    """

    def __init__(
        self, config: Any, executor: Executor, groups: Groups, dataset: Any, programs: dict[int, Program]
    ) -> None:
        self.config, self.executor, self.groups, self.dataset = config, executor, groups, dataset
        self.num_rows = num_validation_rows(config, dataset)
        self.lent: dict[str, Tensor] = {name: tensor.detach() for name, tensor in executor.tensors.items()}
        for name in executor.split:  # replicas share it: gathered while it is needed
            spec = executor.specs[name]
            self.lent[name] = torch.empty(spec.local_shape, dtype=spec.held, device=executor.device)
        self.executors = {
            size: Executor(program, groups, executor.device, tensors=self.lent) for size, program in programs.items()
        }
        _hold(self._gathered(), False)
        for one in self.executors.values():
            _hold(one.copies.values(), False)

    def due(self, step: int) -> bool:
        """After which steps, counted from 1: every so many, and the last."""
        return step % self.config.eval.every == 0 or step == self.config.train.steps

    def measure(self) -> float:
        """MegError where ranks of a replica read different rows, or nothing counts."""
        total, count, labels, checksums = 0.0, 0, set[int](), list[int]()
        with self._whole_weights(), torch.no_grad():
            for executor, batch in self._batches():
                units, num = executor.program.units, len(next(iter(batch.values())))
                size = executor.program.micro_batch_size
                weight = 1 if units.tokens or units.summed else size
                total += executor.evaluate(batch, float(weight))
                counted = executor.program.count(batch)
                count += counted if units.tokens else num
                labels.add(executor.program.labels(batch) * lcm(*self.executors) // size)
                checksums.append(checksum(batch))
        if len(labels) > 1:
            raise MegError(
                "validation: the loss holds a mean over counted labels inside a larger expression, and rows count "
                "different numbers of them, so that it has no mean over rows: return the mean itself"
            )
        mesh, at = self.groups.mesh, self.groups.coords
        where = f"validation, data {type(self.dataset).__name__}"
        label = next(iter(labels), None)
        agreed = agree_on(fold(*checksums), count, mesh.dp, at.dp, self.executor.device, where, label)
        total = torch.tensor(total if at.tp == 0 else 0.0, dtype=torch.float64, device=self.executor.device)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(total)
        summed = next(iter(self.executors.values())).program.units.summed
        return total.item() / agreed.tokens * (self.config.train.global_batch_size if summed else 1)

    def _batches(self) -> Iterator[tuple[Executor, dict[str, Tensor]]]:
        """This replica's share of the rows: as many micro-batches at a time as a step of training has; a short one."""
        dp, at = self.groups.mesh.dp, self.groups.coords.dp
        size, last = next(iter(self.executors)), self.num_rows % next(iter(self.executors))
        full, step = self.num_rows // size, max(self.config.num_microbatches, 1) * size
        first, end = full * at // dp * size, full * (at + 1) // dp * size
        for start in range(first, end, step):
            yield self.executors[size], self._read(start, min(start + step, end))
        if last and at == dp - 1:
            yield self.executors[last], self._read(self.num_rows - last, self.num_rows)

    def _read(self, first: int, end: int) -> dict[str, Tensor]:
        rows = [(index, index) for index in range(first, end)]
        seed = fold(self.config.train.seed, -1)  # not that of any training row
        return read_rows(self.dataset, rows, seed, self.config.data.fields, DTYPES[self.config.precision])

    @contextmanager
    def _whole_weights(self) -> Iterator[None]:
        """Inside, there is memory for what replicas share and for working copies, and the first is gathered."""
        copies = [copy for one in self.executors.values() for copy in one.copies.values()]
        _hold([*self._gathered(), *copies], True)
        dp = self.groups.mesh.dp
        for name in self.lent if self.executor.split else ():
            if name in self.executor.split:
                for replica in range(dp):
                    part = rows_of_replica(self.lent[name], dp, replica)
                    if replica == self.groups.coords.dp:
                        part.copy_(self.executor.tensors[name].detach())
                    if part.numel():
                        dist.broadcast(part, group=self.groups.dp, group_src=replica)
        yield
        _hold([*self._gathered(), *copies], False)

    def _gathered(self) -> list[Tensor]:
        return [self.lent[name] for name in self.executor.split]


def _hold(tensors: Any, held: bool) -> None:
    """Give tensors their memory, or take it back between one evaluation and the next."""
    for tensor in tensors:
        tensor.untyped_storage().resize_(tensor.numel() * tensor.itemsize if held else 0)
