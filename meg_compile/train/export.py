"""The trained weights as one safetensors file that the plain model loads."""

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


def export(params: Mapping[str, Any], values: Iterable[tuple[str, Tensor | None]], path: Path | None) -> None:
    """Write what the plain model's state_dict holds, whole and under its names, as the values arrive one by one.

    params: name -> ParamSpec. values: what `Executor.gather("value")` yields; every rank must call this, rank 0 with
    the `path`, the others with None. A tied weight is written under each of its names, since the format has no
    aliases, so `plain.load_state_dict(safetensors.torch.load_file(path))` finds all of them. Buffers are written as
    far as the state_dict holds them. The file appears under its name when it is complete.
    """
    if path is None:
        for _ in values:
            pass
        return
    entries, offset = {}, 0
    params = {name: spec for name, spec in params.items() if spec.persistent}
    for name, spec in _by_alignment(params):
        size = prod(spec.shape) * spec.held.itemsize
        for alias in (name, *spec.aliases):
            entries[alias] = {
                "dtype": CODES[spec.held],
                "shape": list(spec.shape),
                "data_offsets": [offset, offset + size],
            }
            offset += size
    header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    header += b" " * (-len(header) % 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    written = set()
    with partial.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for name, tensor in values:
            if name not in params:
                continue
            assert tensor is not None and tuple(tensor.shape) == tuple(params[name].shape), name
            data = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data
            for alias in (name, *params[name].aliases):
                file.seek(8 + len(header) + entries[alias]["data_offsets"][0])
                file.write(data)
                written.add(alias)
    assert written == entries.keys(), f"not gathered: {sorted(entries.keys() - written)}"
    os.replace(partial, path)


def _by_alignment(params: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Wide dtypes first, so that every tensor starts at a multiple of its item size."""
    return sorted(params.items(), key=lambda item: -item[1].held.itemsize)
