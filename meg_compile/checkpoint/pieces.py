"""Which boxes of a whole tensor a rank holds, and where they lie in what it holds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from meg_compile.program import ParamSpec


class Run(NamedTuple):
    """`length` consecutive entries of a dim: the first one's position in the rank's tensor, and in the whole one."""

    local: int
    whole: int
    length: int


class Held:
    """The pieces of a whole tensor [shape] that this rank holds: offset in the whole one -> view of what it holds.

    torch.distributed.checkpoint saves and loads what has these methods; a rank may have any number of pieces.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, pieces: dict[torch.Size, torch.Tensor]):
        self.shape, self.dtype, self.pieces = torch.Size(shape), dtype, pieces

    def size(self) -> torch.Size:
        return self.shape

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                MetadataIndex(name, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offset, piece.shape) for offset, piece in self.pieces.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        return self.pieces[index.offset]


def held_whole(tensor: torch.Tensor) -> Held:
    """A tensor that this rank holds whole."""
    return Held(tensor.shape, tensor.dtype, {torch.Size([0] * tensor.dim()): tensor})


def held_part(spec: ParamSpec, local: torch.Tensor, tp_rank: int, first_row: int | None = None) -> Held:
    """A rank's part of a parameter, or of a tensor that is laid out like it. Padding belongs to no piece.

    local: the tp rank's part [spec.local_shape]; of one that replicas share some rows of it, from `first_row` on.
    """
    runs = [_runs(spec, tp_rank, dim) for dim in range(len(spec.shape))]
    if first_row is not None:
        runs[0] = _within(runs[0], first_row, local.shape[0])
    pieces = {}
    for box in product(*runs):
        if all(run.length for run in box) or not prod(spec.shape):
            view = local
            for dim, run in enumerate(box):
                view = view.narrow(dim, run.local, run.length)
            pieces[torch.Size([run.whole for run in box])] = view
    return Held(spec.shape, local.dtype, pieces)


def _runs(spec: ParamSpec, tp_rank: int, dim: int) -> list[Run]:
    runs, local = [], 0
    for whole, length in dict(spec.shards[tp_rank].runs).get(dim, ((0, spec.shape[dim]),)):
        runs.append(Run(local, whole, length))
        local += length
    return runs


def _within(runs: Sequence[Run], first: int, num: int) -> list[Run]:
    """What of some runs lies in a window of the rank's entries, seen from its start."""
    found = []
    for run in runs:
        start, stop = max(run.local, first), min(run.local + run.length, first + num)
        if start < stop:
            found.append(Run(start - first, run.whole + start - run.local, stop - start))
    return found
