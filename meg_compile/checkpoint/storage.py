"""Storage for torch.distributed.checkpoint: one safetensors file a rank, and an index in JSON.

torch's own keeps its index in a pickle, and its safetensors storage has one piece of a name in a file.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, StorageReader, StorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from meg_compile.checkpoint.files import CODES, DTYPES, TensorFile

Index = dict[str, dict[str, Any]]
"""name -> {dtype, shape, pieces: [{offset, shape, file}]}."""


class SavePlanner(DefaultSavePlanner):
    """torch's planner, for a flat dict of name -> `Held`. It lets one rank write what several hold, in turn."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        return self.state_dict[index.fqn].__get_tensor_shard__(index)


class LoadPlanner(DefaultLoadPlanner):
    """The same for loading."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self.state_dict[index.fqn].__get_tensor_shard__(index)


class Stager(StorageWriter):
    """Takes what a rank is to write, and writes nothing yet.

    directory  made anew by rank 0 when the plan is made, so that the other ranks hear of it where that fails
    copies     copies on the CPU, which training does not change, by the names in the file: those of the last save are
               filled again, since memory that was never touched is several times slower to fill. None: no copies
    staged     afterwards what this rank is to write into its file, by the names there
    index      afterwards on rank 0 the index
    """

    def __init__(self, directory: Path, copies: dict[str, torch.Tensor] | None):
        self.directory, self.copies = directory, copies
        self.staged: dict[str, torch.Tensor] = {}
        self.index: Index = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if is_coordinator:
            if self.directory.exists():
                shutil.rmtree(self.directory)
            self.directory.mkdir(parents=True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [replace(plan, storage_data=rank_file(rank)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: Any) -> Future[list[WriteResult]]:
        written = []
        for item in plan.items:
            tensor = planner.resolve_data(item).detach()
            assert item.tensor_data is not None
            name = stored_name(item.index, item.tensor_data.size, item.tensor_data.chunk)
            self.staged[name] = tensor if self.copies is None else self._copied(name, tensor, self.copies)
            written.append(WriteResult(item.index, tensor.nbytes, plan.storage_data))
        return _done(written)

    @staticmethod
    def _copied(name: str, tensor: torch.Tensor, copies: dict[str, torch.Tensor]) -> torch.Tensor:
        if name not in copies or (copies[name].shape, copies[name].dtype) != (tensor.shape, tensor.dtype):
            copies[name] = torch.empty_like(tensor, device="cpu", memory_format=torch.contiguous_format)
        return copies[name].copy_(tensor)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        files = {result.index: result.storage_data for of_rank in results for result in of_rank}
        for name, tensor in sorted(metadata.state_dict_metadata.items()):
            assert isinstance(tensor, TensorStorageMetadata)
            pieces = [
                {"offset": list(c.offsets), "shape": list(c.sizes), "file": files[MetadataIndex(name, c.offsets)]}
                for c in tensor.chunks
            ]
            self.index[name] = {
                "dtype": CODES[tensor.properties.dtype],
                "shape": list(tensor.size),
                "pieces": pieces,
            }

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class Reader(StorageReader):
    """Reads what `Stager` staged once it lies in `directory`, with its `index`."""

    def __init__(self, directory: Path, index: Index):
        self.directory, self.index = directory, index

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def read_metadata(self) -> Metadata:
        tensors: dict[str, Any] = {}
        self.files = {}
        for name, entry in self.index.items():
            chunks = [ChunkStorageMetadata(torch.Size(p["offset"]), torch.Size(p["shape"])) for p in entry["pieces"]]
            properties = TensorProperties(dtype=DTYPES[entry["dtype"]])
            tensors[name] = TensorStorageMetadata(properties, torch.Size(entry["shape"]), chunks)
            for chunk, piece in zip(chunks, entry["pieces"], strict=True):
                index = MetadataIndex(name, chunk.offsets)
                self.files[index] = piece["file"], stored_name(index, tensors[name].size, chunk)
        return Metadata(tensors)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: Any) -> Future[None]:
        by_file: dict[str, list[tuple[str, ReadItem]]] = {}
        for item in plan.items:
            file, name = self.files[item.storage_index]
            by_file.setdefault(file, []).append((name, item))
        for file, items in sorted(by_file.items()):
            with TensorFile(self.directory / file) as opened:
                for name, item in items:
                    opened.read(name, item.storage_offsets, planner.resolve_tensor(item))
        return _done(None)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def rank_file(rank: int) -> str:
    return f"rank_{rank}.safetensors"


def stored_name(index: MetadataIndex, size: torch.Size, chunk: ChunkStorageMetadata) -> str:
    """The name of a piece in its file: the tensor's own where it is whole, else with the offset behind an @."""
    return index.fqn if chunk.sizes == size else f"{index.fqn}@{','.join(map(str, chunk.offsets))}"


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future
