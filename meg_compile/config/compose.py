"""Everything that knows Hydra: what is typed on the way in, what is composed on the way out.

Hydra composes plain YAML without schemas, because its own refusals come one at a time and name little. So before it
composes, `key=value` becomes `++key=value`, which it never refuses, and what was typed wrongly is found afterwards by
`read`, together with everything else.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, OverrideParseException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, MissingMandatoryValue, OmegaConfBaseException

from meg_compile.errors import Fault, nearest

ASSIGNMENT = re.compile(r"\+{0,2}(?P<key>[^=@/~+]+)=")
TARGET_SECTIONS = ("model", "loss", "data")
OWN_DATA_KEYS = ("shuffle", "fields")
OPTIMIZERS_OWN_KEYS = ("name", "weight_decay", "betas", "eps", "momentum")


def register_resolvers() -> None:
    """`${new_run:}` names a run: the time, and some letters so that two of one second differ."""
    OmegaConf.register_new_resolver("new_run", _new_run, use_cache=True, replace=True)


def _new_run() -> str:
    return f"{datetime.now():%Y-%m-%d_%H-%M-%S}_{secrets.token_hex(3)}"


class Sweeps(Callback):
    """Where the sweeps that this process started have their jobs, which may run in other processes."""

    directories: ClassVar[list[Path]] = []

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        self.directories.append(Path(config.hydra.sweep.dir))


class Job(NamedTuple):
    """A job as Hydra left it on disk: what was typed for it, and what was composed."""

    run_dir: Path
    settings: list[str]
    plain: dict[str, Any]


def jobs_in(sweep_dir: Path) -> list[Job]:
    """The jobs of the sweep that was started last in a directory, in order."""
    mark, found = sweep_dir / "multirun.yaml", {}
    started = mark.stat().st_mtime if mark.exists() else math.inf
    for typed in sweep_dir.rglob(".hydra/overrides.yaml"):
        if typed.stat().st_mtime >= started:
            num = load_plain(typed.with_name("hydra.yaml"))["hydra"]["job"]["num"]
            settings = [setting.lstrip("+") for setting in _as_typed(OmegaConf.load(typed))]
            found[num] = Job(typed.parents[1], settings, load_plain(typed.with_name("config.yaml")))
    return [found[num] for num in sorted(found)]


def num_tasks() -> int:
    """How many processes the launcher of the current Hydra job runs it in, each of them the whole of it."""
    launcher = HydraConfig.get().launcher
    return (launcher.get("nodes") or 1) * (launcher.get("tasks_per_node") or 1)


def unnamed_presets(argv: Sequence[str], conf: Path) -> list[Fault]:
    """Choices of presets that are no names, as model=null, which Hydra refuses without saying where."""
    groups = {path.name: path for path in conf.iterdir() if path.is_dir()}
    faults = []
    for arg in argv:
        key, _, value = arg.lstrip("+").partition("=")
        if key in groups and value.lower() in ("null", "true", "false", ""):
            names = sorted(path.stem for path in groups[key].glob("*.yaml"))
            faults.append(Fault(key, value, "is no name of a preset", f"there are {', '.join(names)}"))
    return faults


def rewrite(argv: Sequence[str], conf: Path) -> list[str]:
    """The arguments with every `key=value` as `++key=value`, but choices of config groups and Hydra's own keys.

    conf  our directory of config groups; those of the user's --config-dir count too
    """
    args = get_args_parser().parse_known_args(list(argv))[0]
    folders = [conf, *([Path(args.config_dir)] if args.config_dir else [])]
    groups = {path.name for folder in folders if folder.is_dir() for path in folder.iterdir() if path.is_dir()}

    def one(arg: str) -> str:
        match = ASSIGNMENT.match(arg)
        if not match or arg not in args.overrides:
            return arg
        key = match["key"]
        if key in groups or key == "hydra" or key.startswith("hydra."):
            return arg
        return f"++{arg.lstrip('+')}"

    return [one(arg) for arg in argv]


def asks_for_help(argv: Sequence[str]) -> bool:
    return bool(get_args_parser().parse_known_args(list(argv))[0].help)


def swept_keys(argv: Sequence[str]) -> set[str]:
    """The keys that are given several values, as `plan.tp=1,2`."""
    overrides = get_args_parser().parse_known_args(list(argv))[0].overrides
    try:
        parsed = OverridesParser.create().parse_overrides(overrides)
    except HydraException:  # Hydra says so itself when it composes
        return set()
    return {override.get_key_element().lstrip("+") for override in parsed if override.is_sweep_override()}


def typed_settings() -> list[str]:
    """The settings of the current Hydra job as they were typed."""
    return _as_typed(HydraConfig.get().overrides.task)


def _as_typed(overrides: Any) -> list[str]:
    typed = OmegaConf.to_container(overrides, resolve=False)  # an override may hold an interpolation
    return [str(override) for override in typed] if isinstance(typed, list) else []


def composition_fault(error: BaseException) -> Fault:
    """What Hydra itself refuses, such as an override that does not parse or a --config-name that is not there."""
    lines = [str(error).strip() or type(error).__name__]
    if isinstance(error.__cause__, OmegaConfBaseException):
        lines.append(str(error.__cause__))
    text = " ".join(" ".join(lines).split())
    typed = error.override if isinstance(error, OverrideParseException) else "command line"
    return Fault(typed.lstrip("+"), None, text, "see `python run.py --help` for the form of settings")


def composed(cfg: DictConfig) -> tuple[dict[str, Any], list[Fault]]:
    """The composed settings as plain values, and what went wrong with them.

    To be called inside a Hydra job. Presets that are not there, values that must be given, and interpolations that
    lead nowhere are faults. Where a `_target_` replaces another, the arguments that were meant for the other go; of
    the optimizer's those that presets set for another are null.
    """
    faults = list(_missing_presets())
    plain = _plain(cfg, "", faults)
    writings = list(_writings())
    for section in TARGET_SECTIONS:
        if isinstance(plain.get(section), dict):
            keep = _current_arguments(section, writings) | (set(OWN_DATA_KEYS) if section == "data" else set())
            plain[section] = {key: value for key, value in plain[section].items() if key in keep}
    if isinstance(optim := plain.get("optim"), dict) and optim.get("_target_") is not None:
        keep = _current_arguments("optim", writings)
        optim |= {key: None for key in OPTIMIZERS_OWN_KEYS if key not in keep}
    return plain, faults


def save(values: Mapping[str, Any], path: Path) -> None:
    """Writes plain values as YAML."""
    path.write_text(OmegaConf.to_yaml(OmegaConf.create(dict(values)), resolve=False))


def load_plain(path: Path) -> dict[str, Any]:
    """Plain values from YAML that `save` wrote."""
    plain = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def _plain(node: Any, prefix: str, faults: list[Fault]) -> Any:
    if isinstance(node, ListConfig):
        keys: list[Any] = list(range(len(node)))
    elif isinstance(node, DictConfig):
        keys = list(node.keys())
    else:
        return node
    values = {}
    for key in keys:
        name = f"{prefix}{key}"
        try:
            values[key] = _plain(node[key], f"{name}.", faults)
        except MissingMandatoryValue:
            faults.append(Fault(name, None, "must be given", f"add {name}=VALUE"))
        except OmegaConfBaseException as error:
            written = OmegaConf.to_container(node, resolve=False)[key]  # type: ignore[index]
            said = error.msg if isinstance(error, InterpolationResolutionError) and error.msg else str(error)
            problem = f"cannot be resolved: {said.splitlines()[0]}"
            faults.append(Fault(name, written, problem, "name an existing key, as ${train.steps}"))
    return values if isinstance(node, DictConfig) else list(values.values())


def _missing_presets() -> Iterator[Fault]:
    """Choices of presets that do not exist. Our defaults are `optional`, so that Hydra lets them through."""
    loader = GlobalHydra.instance().config_loader()
    for group, choice in HydraConfig.get().runtime.choices.items():
        folder = group.partition("@")[0]
        if isinstance(choice, str) and not loader.repository.config_exists(f"{folder}/{choice}"):  # type: ignore[attr-defined]
            options = sorted(loader.get_group_options(folder))
            guess = nearest(str(choice), options)
            start = f"did you mean {group}={guess}? " if guess else ""
            yield Fault(group, choice, "there is no such preset", f"{start}There are {', '.join(options)}")


def _current_arguments(section: str, writings: list[dict[str, Any]]) -> set[str]:
    """The keys that were written for the section's last `_target_`, by whatever file or on the command line."""
    target, keys = None, {"_target_"}
    for writing in writings:
        written = writing.get(section)
        if not isinstance(written, dict):
            continue
        if written.get("_target_", target) != target:
            target, keys = written["_target_"], {"_target_"}
        keys |= set(written)
    return keys


def _writings() -> Iterator[dict[str, Any]]:
    """What each config file, in order, and then the command line writes, by section."""
    hydra, loader = HydraConfig.get(), GlobalHydra.instance().config_loader()
    overrides = [*_as_typed(hydra.overrides.hydra), *typed_settings()]
    for default in loader.compute_defaults_list(hydra.job.config_name, overrides, RunMode.RUN).defaults:
        if default.config_path is None or default.config_path.startswith("hydra/"):
            continue
        loaded = loader.repository.load_config(default.config_path)  # type: ignore[attr-defined]
        content = None if loaded is None else OmegaConf.to_container(loaded.config, resolve=False)
        if isinstance(content, dict):
            yield {default.package: content} if default.package else {str(key): part for key, part in content.items()}
    yield _by_section(typed_settings())


def _by_section(overrides: list[str]) -> dict[str, Any]:
    """The command line's settings by section; of settings further down only the first key below it."""
    typed: dict[str, Any] = {}
    for override in OverridesParser.create().parse_overrides(overrides):
        section, _, rest = override.key_or_group.partition(".")
        name, _, deeper = rest.partition(".")
        value = override.value()
        if rest:
            typed.setdefault(section, {})[name] = None if deeper else value
        elif isinstance(value, dict):
            typed.setdefault(section, {}).update(value)
    return typed
