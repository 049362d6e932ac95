"""A directory of checkpoints: which are there, which is the latest good one, and how one comes to be there.

A checkpoint is written as `step_N.part` and renamed to `step_N` when all of it is on the disk, its manifest last. So
what is cut short at any moment never counts.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from meg_compile.checkpoint.files import facts, sync_directory, write_json

MANIFEST, PART = "manifest.json", ".part"


def name_of(step: int) -> str:
    return f"step_{step}"


def steps_in(directory: Path) -> list[int]:
    """The steps of what counts as a checkpoint by its name, good or not, in order."""
    if not directory.is_dir():
        return []
    return sorted(int(found[1]) for path in directory.iterdir() if (found := re.fullmatch(r"step_(\d+)", path.name)))


def remove_leftovers(directory: Path) -> list[str]:
    """Remove what was not finished; its names."""
    found = sorted(directory.glob(f"step_*{PART}")) if directory.is_dir() else []
    for path in found:
        shutil.rmtree(path)
    return [path.name for path in found]


def publish(part: Path, files: dict[str, Any]) -> None:
    """Let a checkpoint count whose `files` (name -> size and hash) are all written."""
    write_json(part / MANIFEST, {"format": 1, "files": files})
    sync_directory(part)
    final = part.with_name(part.name.removesuffix(PART))
    if final.exists():  # a damaged one: of good ones newer than that it started from, a run is refused
        shutil.rmtree(final)
    part.rename(final)
    sync_directory(final.parent)


def prune(directory: Path, step: int, keep: int, keep_every: int | None) -> None:
    """Of the checkpoints up to `step` keep the last `keep`, and those of every `keep_every`-th step."""
    old = [n for n in steps_in(directory) if n <= step][:-keep]
    for n in old:
        if keep_every is None or n % keep_every:
            gone = directory / f"{name_of(n)}{PART}"  # so that what is half removed does not count either
            (directory / name_of(n)).rename(gone)
            shutil.rmtree(gone)


def manifest_of(checkpoint: Path) -> dict[str, Any]:
    """Its files: name -> size and hash. ValueError that says why it is no finished checkpoint."""
    path = checkpoint / MANIFEST
    if not path.is_file():
        raise ValueError(f"it has no {MANIFEST}, so it was not finished")
    try:
        files = json.loads(path.read_bytes())["files"]
        good = all(
            re.fullmatch(r"[\w.]+", name) and isinstance(known["bytes"], int) and isinstance(known["blake2b"], str)
            for name, known in files.items()
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        good, files = False, {}
    if not good or not {"index.json", "state.json"} <= files.keys():
        raise ValueError(f"{MANIFEST} is damaged")
    return files


def damage(checkpoint: Path, files: dict[str, Any], look_into: Iterable[str] = ()) -> list[str]:
    """What is wrong with its files: that are not there, or of another size; `look_into`: of another hash too."""
    found = []
    for name, known in files.items():
        path = checkpoint / name
        if not path.is_file():
            found.append(f"{name} is missing")
        elif path.stat().st_size != known["bytes"]:
            found.append(f"{name} is damaged: {path.stat().st_size} bytes, not {known['bytes']}")
    bad = {problem.split()[0] for problem in found}
    for name in look_into:
        if name not in bad and facts(checkpoint / name) != files[name]:
            found.append(f"{name} is damaged: its bytes are not those that were written")
    return found
