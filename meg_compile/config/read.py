"""From plain values to typed ones, collecting everything that is wrong on the way."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from meg_compile.config.schema import Config
from meg_compile.config.targets import MaybeTarget, Target, check_target
from meg_compile.config.values import Mismatch, convert, describe, kind
from meg_compile.errors import Fault, nearest

UNSET_FIX = "add `defaults: [config, _self_]` at the top of your file, so that it starts from the defaults"


@dataclass
class Reading:
    """What was read, by dotted key (arguments of targets too), and every fault that was found on the way."""

    values: dict[str, Any]
    faults: list[Fault]
    is_complete: bool = False
    """Whether every setting has a value of its type, so that there is a `config`."""

    @property
    def sound(self) -> dict[str, Any]:
        """The values that no fault is about."""
        return {key: value for key, value in self.values.items() if not self.is_reported(key)}

    def is_reported(self, key: str) -> bool:
        """Whether a fault is already about this key, or the section that it is in."""
        return any(key == fault.key or key.startswith(f"{fault.key}.") for fault in self.faults)

    def config(self) -> Config:
        """The configuration, of a complete reading."""
        assert self.is_complete
        return _build(Config, "", self.values)


def read(plain: Mapping[str, Any], known: list[Fault]) -> Reading:
    """Reads composed YAML: unknown and missing keys, wrong types and targets that cannot be called are faults.

    known  faults found while composing; what they are about is not reported again as missing
    """
    reading = Reading({}, list(known))
    _read_section(plain, Config, "", reading)
    reading.is_complete = not reading.faults
    return reading


def schema_keys(schema: type = Config, prefix: str = "") -> list[str]:
    """Every dotted key that the schema names."""
    keys = []
    for name, hint in _hints(schema).items():
        keys.append(prefix + name)
        if is_dataclass(hint) and isinstance(hint, type):
            keys += schema_keys(hint, f"{prefix}{name}.")
    return keys


def _hints(schema: type) -> dict[str, Any]:
    hints = typing.get_type_hints(schema)
    own = [field.name for field in fields(schema) if not _is_target(schema) or field.name not in ("target", "args")]
    return {name: hints[name] for name in own}


def _is_target(schema: Any) -> bool:
    return isinstance(schema, type) and issubclass(schema, (Target, MaybeTarget))


def _without_target(schema: type, plain: Mapping[str, Any]) -> bool:
    return issubclass(schema, MaybeTarget) and plain.get("_target_") is None


def _read_section(plain: Mapping[str, Any], schema: type, prefix: str, reading: Reading) -> None:
    hints = _hints(schema)
    if _is_target(schema) and not _without_target(schema, plain):
        own, passed = list(hints), [*hints, "params"] if prefix == "optim." else []
        args, faults = check_target(prefix[:-1], plain, own, given=2 if prefix == "loss." else 0, passed=passed)
        reading.values |= {f"{prefix}_target_": plain.get("_target_")} | {prefix + name: v for name, v in args.items()}
        for fault in faults:
            if not reading.is_reported(fault.key):
                reading.faults.append(fault)
    else:
        reading.values |= {f"{prefix}_target_": None} if _is_target(schema) else {}
        known = [*hints, "_target_"] if _is_target(schema) else list(hints)
        for name, value in plain.items():
            if name not in known and all(fault.key != prefix + name for fault in reading.faults):
                reading.faults.append(_unknown(prefix, name, value, list(hints)))
    for name, hint in hints.items():
        key = prefix + name
        if name in plain:
            _read_value(plain[name], hint, key, reading)
        elif not reading.is_reported(key):
            reading.faults.append(Fault(key, None, "is not set", UNSET_FIX))


def _read_value(plain: Any, hint: Any, key: str, reading: Reading) -> None:
    if not is_dataclass(hint):
        try:
            reading.values[key] = convert(plain, hint)
        except Mismatch as wanted:
            reading.faults.append(_mismatch(key, plain, hint, str(wanted)))
    elif isinstance(plain, Mapping):
        assert isinstance(hint, type)
        _read_section(plain, hint, f"{key}.", reading)
    else:
        problem = f"is a section, not {kind(plain)}"
        reading.faults.append(Fault(key, plain, problem, f"set one of its keys, as {key}.NAME=VALUE"))


def _build(schema: Any, prefix: str, values: Mapping[str, Any]) -> Any:
    hints = _hints(schema)
    parts = {
        name: _build(hint, f"{prefix}{name}.", values) if is_dataclass(hint) else values[prefix + name]
        for name, hint in hints.items()
    }
    if _is_target(schema):
        rest = {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}
        parts["target"] = rest.pop("_target_")
        parts["args"] = {name: value for name, value in rest.items() if name not in hints}
    return schema(**parts)


def _unknown(prefix: str, name: str, value: Any, names: list[str]) -> Fault:
    """A key that no schema has: the nearest one beside it, or one of that name in another section."""
    guess = nearest(name, names)
    elsewhere = [key for key in schema_keys() if key.rpartition(".")[2] == name]
    close = prefix + guess if guess else next(iter(elsewhere), None) or nearest(prefix + name, schema_keys())
    there = f"{prefix[:-1] or 'the top level'} has {', '.join(names)}"
    fix = f"did you mean {close}?" if close else there
    shown = "{...}" if isinstance(value, Mapping) else "null" if value is None else value
    return Fault(prefix + name, shown, "no such setting", fix)


def _mismatch(key: str, value: Any, hint: Any, wanted: str) -> Fault:
    shown = "null" if value is None else value
    if typing.get_origin(hint) is not typing.Literal:
        return Fault(key, shown, f"must be {wanted}, not {kind(value)}", f"use {describe(hint)}")
    guess = nearest(str(value), [str(one) for one in typing.get_args(hint)])
    fix = f"did you mean {guess}? Use {wanted}" if guess else f"use {wanted}"
    return Fault(key, shown, "no such choice", fix)
