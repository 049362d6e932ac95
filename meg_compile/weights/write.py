"""safetensors files, written piece by piece as whole values arrive one by one."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
CHUNK_BYTES = 4 * 2**20


class Writer:
    """A safetensors file with a place for every tensor.

    tensors: key -> (dtype, shape). The layout follows from them alone: wide dtypes first, so that every tensor starts
    at a multiple of its item size, then by name.
    """

    def __init__(self, path: Path, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]):
        self.tensors, self.missing = tensors, set(tensors)
        entries, offset = {}, 0
        for key in sorted(tensors, key=lambda key: (-tensors[key][0].itemsize, key)):
            dtype, shape = tensors[key]
            end = offset + prod(shape) * dtype.itemsize
            entries[key] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
            offset = end
        header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
        header += b" " * (-len(header) % 8)
        start = 8 + len(header)
        self._offsets = {key: start + entry["data_offsets"][0] for key, entry in entries.items()}
        self._file = path.open("wb")
        self._file.write(len(header).to_bytes(8, "little") + header)

    def put(self, key: str, tensor: Tensor) -> None:
        """Write a tensor, of any dtype and layout, in its place; some rows are copied at a time."""
        dtype, shape = self.tensors[key]
        assert tuple(tensor.shape) == tuple(shape), key
        self._file.seek(self._offsets[key])
        rows = tensor.detach() if tensor.dim() else tensor.detach().view(1)
        num_rows = max(1, CHUNK_BYTES // max(1, rows[:1].numel() * max(dtype.itemsize, rows.element_size())))
        for some in rows.split(num_rows):
            self._file.write(some.to(dtype).contiguous().view(-1).view(torch.uint8).numpy().data)
        self.missing.discard(key)

    def close(self) -> None:
        self._file.close()
        assert not self.missing, f"not gathered: {sorted(self.missing)}"


def save_file(
    params: Mapping[str, Any],
    values: Iterable[tuple[str, Tensor | None]],
    path: Path | None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write what the plain model's state_dict holds, whole and under its names, as one safetensors file.

    params: name -> ParamSpec. values: what `Executor.gather("value")` yields; every rank must call this, rank 0 with
    the `path`, the others with None. dtype: of what is floating-point; None as it is held. A tied weight is written
    under each of its names, since the format has no aliases, so
    `plain.load_state_dict(safetensors.torch.load_file(path))` finds all of them. Buffers are written as far as the
    state_dict holds them. The file appears under its name when it is complete.
    """
    if path is None:
        drain(values)
        return
    names = {name: (name, *spec.aliases) for name, spec in params.items() if spec.persistent}
    tensors = {alias: (stored(params[n], dtype), params[n].shape) for n, aliases in names.items() for alias in aliases}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    writer = Writer(partial, tensors)
    for name, tensor in values:
        for alias in names.get(name, ()):
            assert tensor is not None, name
            writer.put(alias, tensor)
        del tensor  # before the next one is gathered
    writer.close()
    os.replace(partial, path)


def stored(spec: Any, dtype: torch.dtype | None) -> torch.dtype:
    """In which dtype a parameter is written."""
    return dtype if dtype is not None and spec.held.is_floating_point else spec.held


def drain(values: Iterable[Any]) -> None:
    """On ranks that only help to gather."""
    for _ in values:
        pass
