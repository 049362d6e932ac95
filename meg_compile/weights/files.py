"""What lies in a safetensors file, or in a folder of them. Only headers are read here, and nothing is unpickled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from meg_compile.errors import Fault, Refused

KEY = "init.path"
WHOLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
DOWNLOAD = "a model of the Hub is downloaded first, as by `hf download NAME --local-dir FOLDER`"
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")


@dataclass(frozen=True)
class Entry:
    """A tensor in a file. dtype: as safetensors writes it, such as "F32"."""

    file: Path
    key: str
    dtype: str
    shape: tuple[int, ...]

    def read(self) -> Tensor:
        """The tensor as a view of the mapped file, so that only what is copied out of it is read from disk."""
        with safe_open(self.file, "pt") as file:
            return file.get_slice(self.key)[:] if self.shape else file.get_tensor(self.key)


def read_headers(path: Path) -> dict[str, Entry]:
    """Every tensor by its key. path: a safetensors file, or a folder with model.safetensors or its shards. Refused for
    anything else."""
    entries: dict[str, Entry] = {}
    for file in _files(path):
        try:
            with safe_open(file, "pt") as opened:
                for key in opened.keys():  # noqa: SIM118, which is no mapping
                    part = opened.get_slice(key)
                    entries[key] = Entry(file, key, part.get_dtype(), tuple(part.get_shape()))
        except (OSError, SafetensorError) as error:
            raise _refused(
                path, f"{file.name} is no whole safetensors file: {error}", "fetch or write it again"
            ) from error
    return entries


def read_config(path: Path) -> dict[str, Any] | None:
    """A folder's config.json; None for a file, and for a folder without one. Refused for what is no JSON object."""
    if not (file := path / CONFIG).is_file():
        return None
    found = _json(path, file)
    if not isinstance(found, dict):
        raise _refused(path, f"its {CONFIG} is no JSON object", "fetch or write it again")
    return found


def _files(path: Path) -> list[Path]:
    if path.is_file():
        if path.suffix == ".safetensors":
            return [path]
        raise _refused(path, "is no safetensors file, and pickled weights are not opened", _convert(path.parent))
    if not path.is_dir():
        fix = f"give a folder with model.safetensors, or a safetensors file; {DOWNLOAD}"
        raise _refused(path, "there is no such file or folder", fix)
    if (path / WHOLE).is_file():
        return [path / WHOLE]
    if (path / INDEX).is_file():
        index = _json(path, path / INDEX)
        shards = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(shards, Mapping) or not all(isinstance(name, str) for name in shards.values()):
            raise _refused(path, f"its {INDEX} has no weight_map", "fetch or write it again")
        files = [path / Path(name).name for name in sorted(set(shards.values()))]
        if lost := [file.name for file in files if not file.is_file()]:
            raise _refused(path, f"its {INDEX} names {', '.join(lost)}, which is not there", "fetch the folder again")
        return files
    if found := [name for name in PICKLED if (path / name).exists()]:
        raise _refused(
            path, f"its weights are pickled ({found[0]}), and opening a pickle can run any code", _convert(path)
        )
    raise _refused(path, f"there is neither {WHOLE} nor {INDEX} in it", "name the folder that holds them")


def _convert(folder: Path) -> str:
    convert = f'AutoModelForCausalLM.from_pretrained("{folder}", weights_only=True).save_pretrained("NEW_FOLDER")'
    return f"write it as safetensors, where you trust it, by transformers: {convert}"


def _json(path: Path, file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _refused(path, f"its {file.name} cannot be read: {error}", "fetch or write it again") from error


def _refused(path: Path, problem: str, fix: str) -> Refused:
    return Refused(Fault(KEY, path, problem, fix))
