"""The configuration: composed by Hydra, checked here, and from then on plain typed values.

`resolve` turns what Hydra composed into a `Config` and a list of everything that is wrong; `save` and `load` carry it
to the worker processes through `config.yaml`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meg_compile.config import compose, rules
from meg_compile.config.read import read
from meg_compile.config.rules import Here
from meg_compile.config.schema import Config, DataConfig, OptimConfig, PlanConfig, TrainConfig
from meg_compile.config.targets import OWN, Target
from meg_compile.errors import Fault

__all__ = ["OWN", "Config", "DataConfig", "Here", "OptimConfig", "PlanConfig", "Target", "TrainConfig"]
__all__ += ["from_dict", "load", "resolve", "save"]

PATHS = ("data.path", "data.tokenizer", "model.path", "init.path", "checkpoint.dir", "checkpoint.resume", "export.path")
PATHS += ("generate.file", "generate.tokenizer")
NO_PATHS = (("checkpoint.resume", "auto"), ("generate.tokenizer", "bytes"))


def resolve(
    plain: Mapping[str, Any], faults: list[Fault], here: Here, directory: Path
) -> tuple[Config | None, list[Fault]]:
    """The configuration and everything that is wrong with it; None where a value is missing or of a wrong type.

    plain      composed settings
    faults     those found while composing
    directory  where the command was typed: relative paths start there
    """
    reading = read(plain, faults)
    for key in PATHS:
        path = reading.values.get(key)
        if path and (key, path) not in NO_PATHS:
            target = reading.values.get(f"{key.split('.')[0]}._target_", OWN)
            reading.values[key] = _absolute(path, directory, target)
    if isinstance(other := reading.values.get("eval.data"), dict):
        target = other.get("_target_", reading.values.get("data._target_"))
        other |= {name: _absolute(other[name], directory, target) for name in ("path", "tokenizer") if other.get(name)}
    rules.check(reading, here)
    if not reading.is_complete:
        return None, reading.faults
    config = reading.config()
    if config.launch.nproc is None:
        config.launch.nproc = config.num_ranks
    optim, steps = config.optim, config.train.steps
    if optim.warmup_fraction is not None:
        optim.warmup_steps, optim.warmup_fraction = int(optim.warmup_fraction * steps), None
    if optim.warmup_steps is None:
        optim.warmup_steps = 0 if optim.schedule == "constant" else steps // 10
    return config, reading.faults


def _absolute(path: Any, directory: Path, target: str | None) -> Any:
    """The path from `directory`, or every one in a blend of paths and weights.

    A user's own dataset or model may mean something else by `path`: only if the file is there.
    """
    if isinstance(path, list):
        return [_absolute(one, directory, target) for one in path]
    if isinstance(path, dict):
        return path | {key: _absolute(one, directory, target) for key, one in path.items() if key == "path"}
    if not isinstance(path, str):
        return path
    absolute = directory / path
    own = target is not None and target.startswith(OWN)
    return str(absolute) if own or absolute.exists() else path


def save(config: Config, path: Path) -> None:
    """Writes the configuration as YAML, in the layout of `conf/` and with nothing left open."""
    compose.save(config.to_dict(), path)


def load(path: Path) -> Config:
    """The configuration that `save` wrote. Targets must be importable here too."""
    return from_dict(compose.load_plain(path))


def from_dict(plain: Mapping[str, Any]) -> Config:
    """The configuration that `Config.to_dict` gave."""
    reading = read(plain, [])
    assert reading.is_complete, reading.faults
    return reading.config()
