"""Logits of the newest tokens, from all stages in turn, with what came before in the ranks' caches."""

from __future__ import annotations

import torch
import torch.distributed as dist

from meg_compile.ops.decoding import Decoding
from meg_compile.program import Program, Source
from meg_compile.runtime.executor import Executor
from meg_compile.runtime.groups import Groups


class Decoder:
    """One rank of some programs of `compile_decoder` for the same model, rows and length, each for another number of
    new tokens; they share weights and caches.

    executor: the first program's, whose weights the others read; `copy` when they have changed.
    """

    def __init__(self, programs: list[Program], groups: Groups, device: torch.device, total: int):
        self.groups, self.device = groups, device
        self.at = Decoding(total)
        self.executor = Executor(programs[0], groups, device, decoding=self.at)
        tensors = self.executor.tensors
        others = [Executor(program, groups, device, tensors=tensors, decoding=self.at) for program in programs[1:]]
        self.by_new = {
            program.inputs["input_ids"].shape[1]: executor
            for program, executor in zip(programs, (self.executor, *others), strict=True)
        }

    def load(self, source: Source | None = None) -> None:
        """Fill this rank's shards, by default with the starting weights of the model that was compiled."""
        self.executor.load(source)

    def copy(self) -> None:
        """Bring what is read in half precision up to date with the weights."""
        for executor in self.by_new.values():
            executor.copy()

    @torch.no_grad()
    def logits(self, input_ids: torch.Tensor, start: int) -> torch.Tensor | None:
        """[rows, n, V] of n tokens [rows, n], the first of which is at position `start`; None but on the ranks of the
        last stage. A collective of a replica's ranks; all tokens before `start` have been given already.

        MegError for ids that the model has no row for.
        """
        executor = self.by_new[input_ids.shape[1]]
        program, rank = executor.program, self.groups.coords.pp
        for limit in program.limits:
            limit.check({"input_ids": input_ids})
        self.at.start = start
        fields, modules = {"input_ids": input_ids.to(self.device)}, iter(executor.modules)
        values: tuple[torch.Tensor, ...] = ()
        for stage in program.stages:
            before, here, behind = (
                program.pp_rank_of(i) if 0 <= i < len(program.stages) else None
                for i in range(stage.index - 1, stage.index + 2)
            )
            if here != rank:
                continue
            if before not in (None, rank):
                values = tuple(self._receive(example, before) for example in stage.received)
            given = next(modules)(*values, **fields)
            values = given if isinstance(given, tuple) else (given,)
            if behind is None:
                return values[0]
            if behind != rank:
                for value in values:
                    dist.send(value.contiguous(), self._global(behind), group=self.groups.pp)
        return None

    def shared(self, value: torch.Tensor) -> torch.Tensor:
        """What the ranks of the last stage hold in `value`, on all ranks of a replica."""
        if self.groups.pp is not None:
            program = self.executor.program
            dist.broadcast(value, self._global(program.pp_rank_of(len(program.stages) - 1)), group=self.groups.pp)
        return value

    def _receive(self, example: torch.Tensor, pp_rank: int) -> torch.Tensor:
        value = torch.empty(example.shape, dtype=example.dtype, device=self.device)
        dist.recv(value, self._global(pp_rank), group=self.groups.pp)
        return value

    def _global(self, pp_rank: int) -> int:
        return self.groups.mesh.rank(**self.groups.coords._replace(pp=pp_rank)._asdict())
