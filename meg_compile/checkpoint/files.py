"""Files that are there whole or not at all, and safetensors read in parts.

safetensors (https://huggingface.co/docs/safetensors): 8 bytes, the header's length; the header, JSON of
{name: {dtype, shape, data_offsets}}; the tensors' bytes. A tensor is written without a second copy of it, and a part of
one read without mapping the file, so that no more memory is needed than a piece of one tensor.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch

from meg_compile.errors import MegError
from meg_compile.runtime.watch import progress

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
BLOCK = 2**22  # bytes read or written at once


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Write a safetensors file, through to the disk. Returns its size and hash, as `facts` of it would be."""
    entries, offset = {}, 0
    tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].itemsize))  # so that every one lies aligned
    for name, tensor in tensors.items():
        code, end = CODES[tensor.dtype], offset + tensor.numel() * tensor.itemsize
        entries[name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    header += b" " * (-len(header) % 8)
    return write_bytes(path, _parts(header, tensors))


def _parts(header: bytes, tensors: Mapping[str, torch.Tensor]) -> Iterator[Any]:
    yield len(header).to_bytes(8, "little") + header
    for tensor in tensors.values():
        if tensor.numel():
            yield _memory(tensor.detach().cpu().contiguous())


def write_json(path: Path, value: Any) -> dict[str, Any]:
    return write_bytes(path, [json.dumps(value, indent=1).encode() + b"\n"])


def write_bytes(path: Path, parts: Any) -> dict[str, Any]:
    """Write a new file, through to the disk. Returns its size and hash."""
    digest, size = hashlib.blake2b(digest_size=16), 0
    with path.open("wb") as file:
        for part in parts:
            for start in range(0, len(part), BLOCK):
                block = part[start : start + BLOCK]
                file.write(block)
                digest.update(block)
                size += len(block)
                progress()
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": size, "blake2b": digest.hexdigest()}


def facts(path: Path) -> dict[str, Any]:
    """Size and hash of a file."""
    digest, size = hashlib.blake2b(digest_size=16), 0
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
            size += len(block)
            progress()
    return {"bytes": size, "blake2b": digest.hexdigest()}


def sync_directory(path: Path) -> None:
    """Let what was made, renamed or removed in a directory outlast a power cut, where the file system can do that."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


class TensorFile:
    """A safetensors file that is open for reading; a context."""

    def __init__(self, path: Path):
        self.path = path

    def __enter__(self) -> TensorFile:
        self.file: BinaryIO = self.path.open("rb")
        size = int.from_bytes(self.file.read(8), "little")
        self.entries: dict[str, Any] = json.loads(self.file.read(size))
        self.start = 8 + size
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def read(self, name: str, offsets: Sequence[int], into: torch.Tensor) -> None:
        """Fill `into` from the box of its shape that starts at `offsets` of a tensor."""
        entry = self.entries[name]
        shape, dtype = entry["shape"] or [1], DTYPES[entry["dtype"]]
        offsets, into = list(offsets) or [0], into.detach().reshape(into.shape or (1,)) if not into.dim() else into
        assert dtype == into.dtype and len(shape) == into.dim(), name
        if not into.numel():
            return
        row_shape, row_bytes = shape[1:], prod(shape[1:]) * dtype.itemsize
        inner = tuple(slice(at, at + n) for at, n in zip(offsets[1:], into.shape[1:], strict=True))
        whole_rows = list(into.shape[1:]) == list(row_shape)
        step = max(1, BLOCK // row_bytes)
        self.file.seek(self.start + entry["data_offsets"][0] + offsets[0] * row_bytes)
        for first in range(0, into.shape[0], step):
            rows = into.detach().narrow(0, first, min(step, into.shape[0] - first))
            if whole_rows and rows.is_cpu and rows.is_contiguous():
                self._fill(rows, name)
                continue
            block = torch.empty([rows.shape[0], *row_shape], dtype=dtype)
            self._fill(block, name)
            rows.copy_(block[(slice(None), *inner)])

    def _fill(self, tensor: torch.Tensor, name: str) -> None:
        progress()
        memory = _memory(tensor)
        if self.file.readinto(memory) != len(memory):  # type: ignore[attr-defined]
            raise MegError(f"{self.path}: {name} ends too early")


def _memory(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU."""
    return tensor.view(-1).view(torch.uint8).numpy().data
