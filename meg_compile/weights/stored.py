"""Starting weights from files: each rank copies its own pieces out of them, and all that differs is known before."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor, nn

from meg_compile.errors import Fault, Refused
from meg_compile.program import ParamSpec, Program, Source
from meg_compile.weights import gpt2, theirs
from meg_compile.weights.files import KEY, Entry, read_config, read_headers

Wanted: TypeAlias = Callable[[str], Callable[[Tensor], Tensor] | None]
OWN_NAMES = "safetensors.torch.save_model(MODEL.from_pretrained(FOLDER), FILE), init.path=FILE model.path=FOLDER"
FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class Piece:
    """A parameter or buffer as it is stored, under each of its names that are there."""

    entries: tuple[Entry, ...]
    shape: tuple[int, ...]
    convert: partial[Tensor] | None

    def read(self) -> Tensor:
        """The whole, as a view of the mapped file where its layout allows."""
        stored = self.entries[0].read()
        return self.convert(stored) if self.convert else stored


class Stored:
    """Starting weights in files: a `Source` for `Executor.load`. Buffers that no state_dict holds are the model's."""

    def __init__(self, pieces: Mapping[str, Piece], model: Source | None):
        self.pieces, self._model = pieces, model

    def replay(self, wanted: Wanted, seed: int | None = None) -> Iterator[tuple[str, Tensor]]:
        """(name, shard) of everything that is wanted; a piece that is not wanted is not read. seed: of no use here."""
        for name, piece in self.pieces.items():
            if cut := wanted(name):
                yield name, cut(piece.read())

    def value(self, tensor: Tensor) -> Tensor:
        assert self._model is not None, "a model that was given on meta has no values beside its state_dict"
        return self._model.value(tensor)


def stored_weights(path: str | Path, program: Program, check: bool = True) -> Stored:
    """The starting weights of a program's model, for `executor.load`.

    path   a safetensors file, or a folder of transformers: its config.json, and model.safetensors or its shards. Names
           are those of the model's own state_dict; our GPT-2 takes transformers' names and layout too.
    check  compare config.json with the model, and tied weights with each other, too

    Refused where names, shapes, dtypes or, as config.json tells, what cannot be seen in shapes are not the model's.
    """
    path, model = Path(path), program.model
    entries, config = read_headers(path), read_config(path)
    specs = {name: spec for name, spec in program.params.items() if spec.persistent}
    conv1d = gpt2.is_ours(model) and gpt2.is_conv1d(entries)
    pieces = {}
    for name, spec in specs.items():
        keys = [key for alias in (name, *spec.aliases) if (key := _find(model, alias, entries))]
        if keys:
            shape = gpt2.stored_shape(name, spec.shape) if conv1d else spec.shape
            convert = partial(gpt2.from_conv1d, model, name) if conv1d and gpt2.is_ours(model) else None
            pieces[name] = Piece(tuple(entries[key] for key in keys), tuple(shape), convert)
    if check:
        faults = []
        if config is not None:
            if gpt2.is_ours(model):
                faults += gpt2.differences(model, config, path)
            elif theirs.is_theirs(model):
                faults += theirs.differences(model, config, path)
        faults = faults or _differences(path, program, specs, pieces, entries)
        if faults:
            raise Refused(faults)
    return Stored(pieces, program.source)


def fill(model: nn.Module, stored: Stored) -> nn.Module:
    """The plain model, with these weights in the dtypes that it has."""
    state = model.state_dict(keep_vars=True)
    with torch.no_grad():
        for name, whole in stored.replay(lambda _: lambda stored: stored):
            state[name].copy_(whole)
    return model


def _find(model: nn.Module, name: str, entries: Mapping[str, Entry]) -> str | None:
    """The key of a name: with or without what transformers puts before the names of the model inside."""
    prefix = gpt2.PREFIX if gpt2.is_ours(model) else theirs.prefix_of(model) if theirs.is_theirs(model) else ""
    return next((key for key in (name, prefix + name, name.removeprefix(prefix)) if key in entries), None)


def _differences(
    path: Path,
    program: Program,
    specs: Mapping[str, ParamSpec],
    pieces: Mapping[str, Piece],
    entries: Mapping[str, Entry],
) -> list[Fault]:
    """Names, shapes and dtypes that are not the model's; where all are, values that contradict it."""
    used = {entry.key for piece in pieces.values() for entry in piece.entries}
    missing = [n for n, spec in specs.items() if n not in pieces and not _is_harmless(n, tuple(spec.shape))]
    unexpected = [key for key, e in entries.items() if key not in used and not _is_harmless(key, e.shape)]
    shapes, dtypes = [], []
    for name, piece in pieces.items():
        for entry in piece.entries:
            if entry.shape != piece.shape:
                shapes.append(f"{entry.key} {[*entry.shape]} where the model has {[*piece.shape]}")
            if (entry.dtype in FLOATS) != specs[name].dtype.is_floating_point:
                dtypes.append(f"{entry.key} of {entry.dtype}")
    name_it = "name the model whose weights they are, and its sizes"
    if gpt2.is_ours(program.model):
        name_it = "give the model their sizes, or use model=gpt2_from_hf with a folder of transformers"
    elif theirs.is_theirs(program.model):
        name_it += f"; if transformers renames them as it opens them, give a file of its own names: {OWN_NAMES}"
    found = (
        ("these weights of the model are not in it", _listed(missing), name_it),
        ("it holds what the model does not have", _listed(unexpected), name_it),
        ("these have other shapes", shapes, name_it),
        ("these have dtypes that are not opened", dtypes, f"give weights of {', '.join(FLOATS)}"),
    )
    faults = [Fault(KEY, path, f"{problem}: {', '.join(keys)}", fix) for problem, keys, fix in found if keys]
    return faults or _contradictions(path, program, pieces)


def _contradictions(path: Path, program: Program, pieces: Mapping[str, Piece]) -> list[Fault]:
    """Tied weights that are stored with different values, and buffers that became constants with others."""
    faults = []
    read = {name for stage in program.stages for name in stage.params}
    for name, piece in pieces.items():
        first, *others = piece.entries
        for entry in others:
            if not torch.equal(first.read(), entry.read()):
                problem = f"{first.key} and {entry.key} differ, and the model ties them"
                faults.append(Fault(KEY, path, problem, "use a model that does not, as by model.tied=false"))
        if name in program.captured.buffers and name not in read and program.source is not None:
            mine, stored = program.source.value(program.captured.tensors[name]), piece.read()
            if not torch.equal(mine, stored.to(mine.dtype)):
                problem = f"{name} has other values than the model, which was compiled for its own"
                faults.append(Fault(KEY, path, problem, "leave it out of the file"))
    return faults


def _is_harmless(key: str, shape: tuple[int, ...]) -> bool:
    """Causal masks and rotary frequencies, which old checkpoints hold and which follow from a model's configuration."""
    name = key.rpartition(".")[2]
    is_mask = name == "bias" and len(shape) == 4 and shape[:2] == (1, 1) and shape[2] == shape[3]
    return is_mask or (name == "masked_bias" and shape in ((), (1,))) or (name == "inv_freq" and len(shape) == 1)


def _listed(names: list[str]) -> list[str]:
    """Names, those of several layers as one: h.*.ln_1.bias (12)."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(re.sub(r"(?<=\.)\d+(?=\.)", "*", name), []).append(name)
    return [f"{pattern} ({len(group)})" if len(group) > 1 else group[0] for pattern, group in groups.items()]
