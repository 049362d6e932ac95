"""A folder that `from_pretrained` of transformers opens: config.json, and model.safetensors or its shards."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meg_compile.program import Program
from meg_compile.weights import gpt2, theirs
from meg_compile.weights.files import CONFIG, INDEX, WHOLE, read_config
from meg_compile.weights.write import Writer, drain, stored

GIGABYTE = 10**9
# What belongs to a model beside its weights, and is taken along from the folder that it came from.
COMPANIONS = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json")
COMPANIONS += ("merges.txt", "vocab.txt", "tokenizer.model", "chat_template.jinja", "generation_config.json")


def save_folder(
    program: Program,
    values: Iterable[tuple[str, Tensor | None]],
    path: Path | None,
    dtype: torch.dtype | None = None,
    max_shard_gb: float = 5.0,
    like: Path | None = None,
) -> None:
    """Write the model as transformers keeps it, as the values arrive one by one.

    Our GPT-2 becomes a GPT2LMHeadModel. A model of transformers keeps its names and its config; any other one its
    state_dict's names, and there is no config.json, since transformers has no class for it.

    values        what `Executor.gather("value")` yields; every rank must call this, rank 0 with the `path`
    dtype         of what is floating-point; None as it is held
    max_shard_gb  10^9 bytes of tensors, above which model.safetensors becomes shards and their index
    like          the folder that the model came from: what else its config.json says is kept, its tokenizer copied

    The folder appears under its name when it is complete; until then, and where something else has taken its place, it
    is `NAME.partial`.
    """
    if path is None:
        drain(values)
        return
    keys = dict(_keys(program))
    tensors = {
        key: (stored(spec := program.params[name], dtype), _shape(program, name, tuple(spec.shape)))
        for name, names in keys.items()
        for key in names
    }
    partial = path.with_name(path.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    shards = _shards(tensors, max_shard_gb * GIGABYTE)
    writers = {file: Writer(partial / file, {key: tensors[key] for key in held}) for file, held in shards.items()}
    file_of = {key: file for file, held in shards.items() for key in held}
    for name, tensor in values:
        for key in keys.get(name, ()):
            assert tensor is not None, name
            model = program.model
            writers[file_of[key]].put(key, gpt2.to_conv1d(model, name, tensor) if gpt2.is_ours(model) else tensor)
        del tensor  # before the next one is gathered
    for writer in writers.values():
        writer.close()
    if len(shards) > 1:
        total = sum(prod(shape) * dtype.itemsize for dtype, shape in tensors.values())
        _write(partial / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(file_of.items()))})
    if config := _config(program, dtype, like):
        _write(partial / CONFIG, config)
        for name in COMPANIONS:
            if like and (like / name).is_file():
                shutil.copyfile(like / name, partial / name)
    os.replace(partial, path)


def _keys(program: Program) -> Iterator[tuple[str, list[str]]]:
    """Each parameter and buffer of the state_dict, with the keys under which it is written."""
    ours, from_transformers = gpt2.is_ours(program.model), theirs.is_theirs(program.model)
    skipped = theirs.left_out(program.model) if from_transformers else set()
    for name, spec in program.params.items():
        if not spec.persistent:
            continue
        if ours:
            yield name, [gpt2.key_of(name)]
        else:
            names = [alias for alias in (name, *spec.aliases) if alias not in skipped]
            yield name, names or [name] * (not spec.buffer)


def _shape(program: Program, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    return gpt2.stored_shape(name, shape) if gpt2.is_ours(program.model) else shape


def _shards(tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]], max_bytes: float) -> dict[str, list[str]]:
    """The keys in each file, in the order of the model."""
    groups: list[list[str]] = [[]]
    filled = 0
    for key, (dtype, shape) in tensors.items():
        size = prod(shape) * dtype.itemsize
        if groups[-1] and filled + size > max_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(key)
        filled += size
    if len(groups) == 1:
        return {WHOLE: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": keys for i, keys in enumerate(groups, start=1)}


def _config(program: Program, dtype: torch.dtype | None, like: Path | None) -> dict[str, Any] | None:
    model: Any = program.model
    if gpt2.is_ours(model):
        config = gpt2.config_of(model)
        kept = (like and read_config(like)) or {}
        if kept.get("model_type") == config["model_type"]:
            tokens = {key: kept[key] for key in ("bos_token_id", "eos_token_id") if key in kept}
            config = kept | config | tokens
    elif theirs.is_theirs(model):
        config = theirs.config_of(model)
    else:
        return None
    floats = {stored(spec, dtype) for spec in program.params.values() if not spec.buffer}
    config.pop("torch_dtype", None)
    return config | {"dtype": str(next(iter(floats))).removeprefix("torch.")} if len(floats) == 1 else config


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
