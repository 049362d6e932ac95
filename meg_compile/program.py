"""A compiled program: what every rank runs and holds, before any rank exists."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import fx, nn

from meg_compile.axes.infer import Axes
from meg_compile.axes.layout import Shard
from meg_compile.eject import eject
from meg_compile.errors import MegError
from meg_compile.explain.describe import explain, to_dict
from meg_compile.graph.capture import Captured
from meg_compile.graph.cost import Flops, count_flops, training_flops
from meg_compile.ops.counted import Places, row_keys
from meg_compile.passes.choose import Choice
from meg_compile.passes.context import Fields
from meg_compile.passes.dropout import KEYS
from meg_compile.passes.partition import Stage
from meg_compile.passes.tokens import HALVES, Limit, Units
from meg_compile.plan import Plan


class Source(Protocol):
    """Where starting weights come from: wanted(name) cuts a rank's shard out of a whole tensor, or is None."""

    def replay(self, wanted: Any, seed: int | None = None) -> Iterator[tuple[str, torch.Tensor]]: ...

    def value(self, tensor: torch.Tensor) -> torch.Tensor:
        """The real value of a tensor that the model holds outside its parameters and buffers."""
        ...


@dataclass(frozen=True)
class ParamSpec:
    """A parameter or buffer, whole and as ranks hold it.

    dtype:     in which the graph reads it.
    persistent: the model's state_dict holds it; aliases are its other names there.
    shards:    for each tp rank the part that it holds.
    stages:    the stages that read it; the first one owns it (counts it, exports it).
    partial:   whole on every tp rank, with gradients that are still to be summed over them.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    buffer: bool
    persistent: bool
    aliases: tuple[str, ...]
    stages: tuple[int, ...]
    shards: tuple[Shard, ...]
    partial: bool

    @property
    def local_shape(self) -> tuple[int, ...]:
        return self.shards[0].local_shape

    @property
    def halved(self) -> bool:
        """It is read in half precision, as a working copy of what is `held`."""
        return not self.buffer and self.dtype in HALVES

    @property
    def held(self) -> torch.dtype:
        """In which a rank keeps it, sums its gradients and moves it: the master of a half-precision one is float32."""
        return torch.float32 if self.halved else self.dtype

    @property
    def sharded(self) -> bool:
        return bool(self.shards[0].runs)

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def local_numel(self) -> int:
        return torch.Size(self.local_shape).numel()

    def slice(self, whole: torch.Tensor, tp_rank: int, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """A tp rank's part of a whole tensor, or its rows from `start` to `stop`, as a new tensor."""
        return self.shards[tp_rank].slice(whole, start, stop)

    def place(self, part: torch.Tensor, tp_rank: int, whole: torch.Tensor, start: int = 0) -> None:
        """Write a tp rank's part, or its rows from `start` on, where they belong in a whole tensor."""
        self.shards[tp_rank].place(part, whole, start)


@dataclass
class Program:
    """The result of `compile`.

    plan:             the parallel plan.
    inputs:           one micro-batch of each field that the program reads, on meta.
    parts:            the fields of which each cp rank reads its part, and where their sequence lies.
    stages:           pp * vpp stages in order; the schedule says which pipeline rank runs which (`pp_rank_of`).
    params:           every parameter and buffer by the user's name.
    units:            what the loss of a micro-batch is a sum over.
    limits:           the fields that hold indices, and how far they reach.
    draws:            of every dropout, in the order in which the model calls them: where the axes of a whole value lie,
                      and whether each row of the batch draws its own mask.
    captured, axes, choice:  what the stages were made from, for explanations.
    model:            the plain model as it was compiled, on meta where it was built for that.
    source:           the starting weights; None for a model that was given on meta.
    again:            compiles the same model for other inputs, in training or evaluation mode, with the same cut.
    """

    plan: Plan
    inputs: dict[str, torch.Tensor]
    parts: Fields
    stages: list[Stage]
    params: dict[str, ParamSpec]
    units: Units
    limits: list[Limit]
    draws: list[tuple[Places, bool]]
    captured: Captured
    axes: Axes
    choice: Choice
    model: nn.Module = field(repr=False)
    source: Source | None = field(default=None, repr=False)
    again: Callable[[dict[str, torch.Tensor], bool], Program] | None = field(default=None, repr=False)

    @property
    def micro_batch_size(self) -> int:
        return next(iter(self.inputs.values())).shape[0]

    def stage_of_rank(self, pp_rank: int) -> list[int]:
        """The stages that a pipeline rank runs, in order."""
        return self.plan.stages_of(pp_rank)

    def pp_rank_of(self, stage: int) -> int:
        return self.plan.rank_of(stage)

    @property
    def pinned(self) -> Plan:
        """The plan, with the cut into stages that was made."""
        if self.plan.num_stages == 1 or self.plan.stages is not None:
            return self.plan
        return replace(self.plan, stages=tuple(len(stage.layers) for stage in self.stages), split=None)

    def variant(self, inputs: dict[str, torch.Tensor], training: bool = False) -> Program:
        """The same model for one micro-batch of another shape, or in evaluation, cut and sharded as this program is, so
        that an `Executor` of it can run on the tensors of one of this.

        MegError where these inputs have the model sharded otherwise; Refused as by `compile`.
        """
        assert self.again is not None
        program = self.again(inputs, training)
        for name, spec in program.params.items():
            mine = self.params.get(name)
            if name in program.captured.constants:
                continue
            if mine is None or mine.shards != spec.shards or not set(spec.stages) <= set(mine.stages):
                raise MegError(
                    f"for these inputs {name} is held by other ranks, so that they need weights of their own"
                )
        return program

    def check(self, batch: dict[str, torch.Tensor]) -> None:
        """MegError for a replica's rows, field by field [rows, ...], that this program was not compiled for."""
        for name, example in self.inputs.items():
            if name not in batch:
                how = "made by program.keyed(batch, seed, step, rows)" if name == KEYS else "as when it was compiled"
                raise MegError(f"the batch has no field {name}, which the program reads ({how})")
            given, wanted = batch[name], [*example.shape[1:]]
            if [*given.shape[1:]] != wanted or given.dtype != example.dtype:
                problem = f"field {name} has rows of {given.dtype} {[*given.shape[1:]]}, not {example.dtype} {wanted}"
                raise MegError(f"{problem}; program.variant(inputs) compiles the model for others")
        counts = {name: len(batch[name]) for name in self.inputs}
        if len(set(counts.values())) > 1:
            raise MegError(f"the fields of a batch have different numbers of rows: {counts}")
        num_rows = next(iter(counts.values()))
        if num_rows == 0 or num_rows % self.micro_batch_size:
            problem = f"{num_rows} rows do not divide into micro-batches of {self.micro_batch_size}"
            raise MegError(f"{problem}; program.variant(inputs) compiles the model for others")

    def micro_batches(self, batch: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        """A replica's rows, field by field [rows, ...], cut into micro-batches of the fields that are read."""
        size = self.micro_batch_size
        fields = {name: values.split(size) for name, values in batch.items() if name in self.inputs}
        return [dict(zip(fields, values, strict=True)) for values in zip(*fields.values(), strict=True)]

    def keyed(self, batch: dict[str, torch.Tensor], seed: int, step: int, rows: list[int]) -> dict[str, torch.Tensor]:
        """A replica's rows with the keys of their dropout masks; rows: their positions in the whole run."""
        return batch | {KEYS: row_keys(seed, step, rows)} if KEYS in self.inputs else batch

    def count(self, batch: dict[str, torch.Tensor]) -> int:
        """Units (counted tokens) in a replica's rows: the losses of its micro-batches are sums over these.

        MegError where the losses of micro-batches do not add up to that of the global batch.
        """
        return self.units.count(self._counted(batch))

    def labels(self, batch: dict[str, torch.Tensor]) -> int:
        """What all replicas must have alike for the mean of their losses to be the global batch's; 0 for nothing."""
        return self.units.labels(self._counted(batch)[0])

    def _counted(self, batch: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        return self.micro_batches({name: values for name, values in batch.items() if name != KEYS})

    def holders(self, spec: ParamSpec) -> tuple[int, ...]:
        """The pipeline ranks that hold a copy of a parameter."""
        return tuple(sorted({self.pp_rank_of(s) for s in spec.stages}))

    def owner(self, spec: ParamSpec) -> int:
        """The pipeline rank whose copy of a parameter is counted and exported."""
        return self.pp_rank_of(spec.stages[0])

    def splits(self, spec: ParamSpec) -> bool:
        """Whether replicas share a parameter, each with some of its rows.

        One that several stages of a pipeline rank read stays whole, as does one that no stage reads.
        """
        readers = [self.pp_rank_of(stage.index) for stage in self.stages if spec.name in stage.params]
        shared = self.plan.zero > 0 and self.plan.dp > 1
        fits = not spec.buffer and bool(spec.shape) and spec.dtype.is_floating_point
        return shared and fits and 0 < len(readers) == len(set(readers))

    def share(self, spec: ParamSpec) -> int:
        """Entries of a parameter that a rank keeps and its optimizer moves: what replicas share is padded to whole rows
        for each."""
        if not self.splits(spec):
            return spec.local_numel
        num_rows = spec.local_shape[0]
        return -(-num_rows // self.plan.dp) * (spec.local_numel // num_rows) if num_rows else 0

    def weight_bytes(self, spec: ParamSpec) -> int:
        """What a rank keeps of a parameter between steps, a working copy in half precision included.

        Gradients and optimizer states come on top.
        """
        copy = spec.local_numel * spec.dtype.itemsize if spec.halved and not self.splits(spec) else 0
        return self.share(spec) * spec.held.itemsize + copy

    def parallel_flops(self) -> Flops:
        """How much of the model runs in parallel over tp: (parallel, total, share) of its floating-point operations.

        Counted is the forward of one micro-batch in the plain model: two for each multiply-add of matrix products
        (Linears, bmm, einsum, those of weights with each other too), of convolutions and of
        scaled_dot_product_attention (both its products, over all pairs of positions, whatever the mask), as Megatron's
        formulas do. What goes entry by entry, embeddings, norms, softmax and the loss count nothing, nor does an
        operator without a rule. Parallel is an operator of which each tp rank computes a part: a sharded axis runs
        through it, or, with plan.sp, it runs on the rank's part of the sequence. With plan.cp the counts are those of
        one cp rank's part of every sequence.
        """
        return count_flops(self._nodes())

    def training_flops(self) -> int:
        """Floating-point operations of a forward and a backward of one micro-batch in the plain model, counted as by
        `parallel_flops`: three times its total where all is trained, as Megatron's formula has it (Narayanan et al.
        2021, arXiv:2104.04473, equation 3). Products whose gradients nobody needs count less; what is recomputed does
        not count."""
        return training_flops(self._nodes(), self.plan.cp)

    def _nodes(self) -> Iterable[fx.Node]:
        """Of all stages; some run in several."""
        return {node.name: node for stage in self.stages for node in stage.graph.nodes}.values()

    def explain(self, num_micro_batches: int = 1, block: int = 0) -> str:
        """The axes, every pair, every Linear outside one and why, the graph of one block with its f and g, the stages,
        and the bytes that a step of so many micro-batches moves."""
        return explain(self, num_micro_batches, block)

    def eject(self, directory: str | Path, num_micro_batches: int | None = None) -> None:
        """Write the program as source that runs with torch alone, as `meg_compile.eject.eject` says."""
        eject(self, Path(directory), num_micro_batches)

    def to_dict(self, num_micro_batches: int = 1) -> dict[str, Any]:
        """The same as plain data (plan.json)."""
        return to_dict(self, num_micro_batches)
