"""One rank of a compiled program: its shards, its stages, its gradients."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn

from meg_compile.errors import MegError
from meg_compile.graph.nodes import CP, DECODING, RNG, TP
from meg_compile.ops.decoding import Decoding
from meg_compile.ops.dropout import ShardRng
from meg_compile.ops.group import Group
from meg_compile.passes.context import take_parts
from meg_compile.program import ParamSpec, Program, Source
from meg_compile.runtime.gradients import Overlapped, all_reduce_buckets
from meg_compile.runtime.groups import Groups
from meg_compile.runtime.precision import COPY
from meg_compile.runtime.schedule import Batch, Run, one_stage, pipeline
from meg_compile.runtime.stage import StageModule, bind
from meg_compile.runtime.watch import progress
from meg_compile.runtime.zero import Shards, row_span

META = torch.device("meta")
MIN_SENT_BYTES, MAX_SENT_BYTES = 2**20, 2**26


class Executor:
    """Holds and runs what one rank holds and runs.

    parameters:  this rank's trainable shards by the user's names; under plan.zero, of replicas too.
    tensors:     those and its frozen parameters and buffers; given, they are another executor's
                 of the same plan, without plan.zero, but for constants. A half-precision parameter is float32 here.
    copies:      what the stages read of half-precision parameters; made from `tensors` when a step starts.
    """

    def __init__(
        self,
        program: Program,
        groups: Groups,
        device: torch.device,
        seed: int = 0,
        tensors: dict[str, torch.Tensor] | None = None,
        compiled: bool = False,
        decoding: Decoding | None = None,
    ):
        self.program, self.groups, self.device = program, groups, device
        at = groups.coords
        self.stages = [program.stages[i] for i in program.stage_of_rank(at.pp)]
        local = {s.index for s in self.stages}
        self.specs = {n: spec for n, spec in program.params.items() if local & set(spec.stages)}
        self.split = {name for name, spec in self.specs.items() if program.splits(spec)}
        whole = self._borrow(tensors) if tensors else self._allocate()
        self.copies = {
            n: torch.empty(s.local_shape, dtype=s.dtype, device=device)
            for n, s in self.specs.items()
            if s.halved and n not in self.split
        }
        tp = Group(program.plan.tp, at.tp, groups.tp)
        self.rng = ShardRng(seed + 7919 * (1 + groups.rank), device)
        self.cp = Group(program.plan.cp, at.cp, groups.cp)
        bound = {TP: tp, CP: self.cp, RNG: self.rng, DECODING: decoding}
        read = whole | {f"{COPY}{name}": copy for name, copy in self.copies.items()}
        self.modules: list[StageModule] = [bind(s, program.plan, read, bound, device, compiled) for s in self.stages]
        self.shards = self._shard(whole) if self.split else None
        self.tensors = whole | (self.shards.parameters if self.shards else {})
        self.parameters = {n: t for n, t in self.tensors.items() if isinstance(t, nn.Parameter) and t.requires_grad}
        self.overlapped, self.is_reducing = self._overlapped(), False
        self.shared = self._shared_groups()
        self._runs: dict[tuple[int, bool], Run] = {}

    def _allocate(self) -> dict[str, torch.Tensor]:
        return {n: _allocate(spec, META if n in self.split else self.device) for n, spec in self.specs.items()}

    def _borrow(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Another executor's tensors, and this program's own constants, which may have its names and other values.

        MegError for tensors that are cut otherwise, or that replicas share.
        """
        if self.split:
            raise MegError("under plan.zero no rank has whole weights to lend: use plan.zero=0")
        program, found = self.program, {}
        for name, spec in self.specs.items():
            if name in program.captured.constants:
                assert program.source is not None, "a model that was given on meta has no constants"
                value = program.source.value(program.captured.tensors[name])
                found[name] = spec.slice(value, self.groups.coords.tp).to(self.device, spec.dtype)
            elif name in tensors and tensors[name].shape == spec.local_shape:
                found[name] = tensors[name]
            else:
                raise MegError(f"{name} is not lent as this program holds it: compile it by program.variant(inputs)")
        return found

    def load(self, source: Source | None = None, seed: int | None = None) -> None:
        """Fill this rank's shards with starting weights; by default those of the model that was compiled."""
        source = source or self.program.source
        assert source is not None, "a model that was given on meta has no weights: pass a source"
        at = self.groups.coords
        tp_rank, missing = at.tp, set(self.tensors)

        def wanted(name: str):
            spec = self.specs.get(name)
            return spec and (lambda whole: spec.slice(whole, tp_rank, *self._span(spec, at.dp)).to(spec.held))

        with torch.no_grad():
            for name, shard in source.replay(wanted, seed):
                self.tensors[name].copy_(shard)
                missing.discard(name)
                progress()
            for name in missing & self.program.captured.buffers:
                constant = self.program.captured.tensors[name]
                self.tensors[name].copy_(self.specs[name].slice(source.value(constant), tp_rank))
                missing.discard(name)
        assert not missing, f"no starting values for {sorted(missing)}"

    def seed(self, seed: int, step: int = 0) -> None:
        """Seed this device's generator, from which dropout="fast" draws the masks of whole values: alike on the tp
        ranks that hold the same value, otherwise on each replica, part of the sequence and stage.

        step: where a run goes on without the streams that it had; both then start anew, as others than before.
        """
        at = self.groups.coords
        seed += 15485863 * step
        torch.manual_seed(seed + 100 * at.pp + 10007 * at.dp + 1000003 * at.cp)
        if step:
            self.rng.seed(seed + 7919 * (1 + self.groups.rank))

    def run(self, batch: Batch, scale: float, reduce: bool = False) -> float:
        """Forward and backward over all micro-batches of a replica's rows {field: [rows, ...]}.

        Returns the sum of scale * loss on the ranks of the last stage, 0.0 on others; adds to the gradients.
        reduce: sums over replicas may start in backward; gradients must be empty before, and `reduce_gradients` follow.
        MegError for an index outside its vocabulary, and for rows that the program was not compiled for.
        """
        if reduce and self.overlapped:
            self.overlapped.start(self._num_micro_batches(batch))
            self.is_reducing = True
        return self._run(batch, scale, True)

    def evaluate(self, batch: Batch, scale: float) -> float:
        """The same without backward; whether dropout drops is settled when the program is compiled."""
        return self._run(batch, scale, False)

    def _run(self, batch: Batch, scale: float, backward: bool) -> float:
        self.program.check(batch)
        for limit in self.program.limits:
            limit.check(batch)
        num = self._num_micro_batches(batch)
        if (num, backward) not in self._runs:  # a schedule keeps the tensors that it receives into: one is enough
            self._runs = {(num, backward): self._schedule(num, backward)}
        self.copy()
        if self.shards:
            self.shards.begin()
        batch = take_parts({n: v.to(self.device) for n, v in batch.items()}, self.program.parts, self.cp)
        return self._runs[num, backward](batch, scale, backward)

    def copy(self) -> None:
        """Bring the half-precision copies up to date with the weights; a run does so itself."""
        if self.copies:
            with torch.no_grad():
                torch._foreach_copy_(list(self.copies.values()), [self.tensors[name] for name in self.copies])

    def _num_micro_batches(self, batch: Batch) -> int:
        return next(iter(batch.values())).shape[0] // self.program.micro_batch_size

    def reduce_gradients(self) -> None:
        """Sum gradients over tp (partial ones), over the copies of tied parameters, and over dp and cp."""
        if self.shards:
            self.shards.finish()
        is_reduced, self.is_reducing = self.is_reducing, False
        if is_reduced and self.overlapped:
            self.overlapped.finish()
        if self.groups.tp is not None:
            all_reduce_buckets((self._grad(n) for n in self.parameters if self.specs[n].partial), self.groups.tp)
        for names, group in self.shared:
            if group is not None:
                all_reduce_buckets((self._grad(n) for n in names), group)
        for apart, group in ((True, self.groups.cp), (False, None if is_reduced else self.groups.dp_cp)):
            if group is not None:
                found = (p.grad for n, p in self.parameters.items() if (n in self.split) == apart)
                all_reduce_buckets((grad for grad in found if grad is not None), group)

    def scale_gradients(self, factor: float) -> None:
        grads = [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
        if factor != 1 and grads:
            torch._foreach_mul_(grads, factor)

    def by_name(self) -> dict[str, nn.Parameter]:
        """This rank's trainable shards, tied ones under all of their names."""
        return {name: p for first, p in self.parameters.items() for name in (first, *self.specs[first].aliases)}

    def norm_squared(self) -> torch.Tensor:
        """This rank's share of the squared gradient norm: summed over the world it counts every parameter once."""
        mine = [p.grad for n, p in self.parameters.items() if p.grad is not None and self._counts(self.specs[n])]
        if not mine:
            return torch.zeros((), dtype=torch.float64, device=self.device)
        return torch.stack([n.double() ** 2 for n in torch._foreach_norm(mine)]).sum()

    def gather(self, kind: Literal["value", "grad"] = "value") -> Iterator[tuple[str, torch.Tensor | None]]:
        """Every parameter (for "grad", every trainable one) whole on rank 0's CPU, None on others; one at a time.

        A collective: all ranks iterate to the end.
        """
        for name, spec in self.program.params.items():
            progress()
            if kind == "value" or spec.trainable:
                yield name, self._assemble(spec, kind)

    def _assemble(self, spec: ParamSpec, kind: str) -> torch.Tensor | None:
        """A whole parameter on rank 0, to which its holders send their rows some at a time."""
        mesh, rank = self.groups.mesh, self.groups.rank
        whole = torch.zeros(spec.shape, dtype=spec.held) if rank == 0 else None
        dp = self.program.plan.dp if self.program.splits(spec) else 1
        for tp_rank, dp_rank in product(range(self.program.plan.tp if spec.sharded else 1), range(dp)):
            holder = mesh.rank(tp=tp_rank, pp=self.program.owner(spec), dp=dp_rank)
            if rank not in (0, holder):
                continue
            start, stop = self._span(spec, dp_rank)
            found = self._found(spec, kind) if rank == holder else None
            for first in range(start, stop, step := _rows_at_once(spec)):
                last = min(first + step, stop)
                if found is None:
                    rows = torch.zeros((last - first, *spec.local_shape[1:]), dtype=spec.held, device=self.device)
                else:
                    rows = found[first - start : last - start].to(spec.held).contiguous()
                if holder != 0 and rows.numel():
                    dist.send(rows, 0) if rank == holder else dist.recv(rows, holder)
                if whole is not None:
                    spec.place(rows.cpu(), tp_rank, whole, first)
        return whole

    def _found(self, spec: ParamSpec, kind: str) -> torch.Tensor | None:
        """What this rank holds of a parameter or of its gradient, as rows."""
        held = self.tensors[spec.name]
        found = held.detach() if kind == "value" else held.grad
        return found if found is None or found.dim() else found.view(1)

    def _span(self, spec: ParamSpec, dp_rank: int) -> tuple[int, int]:
        """Which rows of a tp rank's part a replica has; a number is one row."""
        num_rows = spec.local_shape[0] if spec.local_shape else 1
        return row_span(num_rows, self.program.plan.dp, dp_rank) if self.program.splits(spec) else (0, num_rows)

    def _shard(self, whole: dict[str, torch.Tensor]) -> Shards:
        names = {p: name for name in self.split if isinstance(p := whole[name], nn.Parameter)}
        read = {self.specs[name].dtype for name in self.split if self.specs[name].halved}
        mesh = self.groups.device_mesh["dp"]
        return Shards(self.modules, names, self.program.plan.zero, mesh, self.device, next(iter(read), None))

    def _grad(self, name: str) -> torch.Tensor:
        """A parameter's gradient; zero where no backward reached this rank's copy of it."""
        parameter = self.parameters[name]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return parameter.grad

    def _counts(self, spec: ParamSpec) -> bool:
        at = self.groups.coords
        return (
            (at.dp == 0 or spec.name in self.split)
            and at.cp == 0
            and at.pp == self.program.owner(spec)
            and (spec.sharded or at.tp == 0)
        )

    def _schedule(self, num_micro_batches: int, backward: bool) -> Run:
        if self.groups.pp is None:
            return one_stage(self.program, self.modules[0])
        return pipeline(
            self.program, self.modules, self.stages, self.groups.pp, self.device, num_micro_batches, backward
        )

    def _overlapped(self) -> Overlapped | None:
        """None where there are no replicas, or where a schedule computes gradients of weights beside autograd."""
        if any(module.later for module in self.modules):
            return None
        whole = [p for n, p in self.parameters.items() if n not in self.split]
        return Overlapped(whole, self.groups.dp_cp) if whole and self.groups.dp_cp is not None else None

    def _shared_groups(self) -> list[tuple[list[str], dist.ProcessGroup | None]]:
        """Tied parameters by the pipeline ranks that hold copies, each with this rank's group of holders.

        Every rank takes part in making every group, in the same order.
        """
        mesh, at = self.groups.mesh, self.groups.coords
        holders: dict[tuple[int, ...], list[str]] = {}
        for name, spec in self.program.params.items():
            if spec.trainable and len(ranks := self.program.holders(spec)) > 1:
                holders.setdefault(ranks, []).append(name)
        found = []
        for ranks, names in holders.items():
            mine = None
            for tp in range(mesh.tp):
                for cp, dp in product(range(mesh.cp), range(mesh.dp)):
                    group = dist.new_group([mesh.rank(tp=tp, cp=cp, dp=dp, pp=pp) for pp in ranks])
                    if (at.tp, at.cp, at.dp) == (tp, cp, dp) and at.pp in ranks:
                        mine = group
            found.append((names, mine))
        return found


def _rows_at_once(spec: ParamSpec) -> int:
    """Of a part that is sent to rank 0: about a 32nd, so that memory there is little more than that of the whole."""
    num_rows = max(spec.local_shape[0], 1) if spec.local_shape else 1
    total = spec.local_numel * spec.held.itemsize
    wanted = min(max(total // 32, MIN_SENT_BYTES), MAX_SENT_BYTES)
    return max(1, num_rows * wanted // max(total, 1))


def _allocate(spec: ParamSpec, device: torch.device) -> torch.Tensor:
    empty = torch.empty(spec.local_shape, dtype=spec.held, device=device)
    return empty if spec.buffer else nn.Parameter(empty, requires_grad=spec.trainable)
