"""Sections with a `_target_`: the user's (or our own) class or function, and its arguments.

A target is a dotted path found on sys.path. What is in its section beside `_target_` are its arguments; a value
that is itself a mapping with a `_target_` is built first, so a model can be given its own config object.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meg_compile.config.values import Mismatch, convert, is_simple, kind
from meg_compile.errors import Fault, nearest

OWN = "meg_compile."


@dataclass
class Target:
    """A class or function by its dotted path, with keyword arguments."""

    target: str
    """Dotted path: `package.module.Name`."""
    args: dict[str, Any]
    """Its arguments, as written in the configuration."""

    def build(self) -> Any:
        """Calls the target. What it raises is the target's own."""
        return _build({"_target_": self.target, **self.args})

    def function(self) -> Callable[..., Any]:
        """The target as something to call later: a class is built, a function has its arguments bound."""
        found = locate(self.target)
        return self.build() if inspect.isclass(found) else functools.partial(found, **_build(self.args))


@dataclass
class MaybeTarget:
    """A section that may name a class by its `_target_`; without one it has settings of ours alone."""

    target: str | None
    """Dotted path, or null."""
    args: dict[str, Any]
    """Its arguments, as written in the configuration."""


class TargetError(Exception):
    """A dotted path that leads nowhere: `problem` and `fix` as in a `Fault`."""

    def __init__(self, problem: str, fix: str):
        super().__init__(problem)
        self.problem, self.fix = problem, fix


def locate(path: str) -> Any:
    """The object at a dotted path. Raises `TargetError` that says which part of the path is wrong, and why."""
    parts = path.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise TargetError("not a dotted path", "write it as package.module.Name")
    for end in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:end])
        try:
            found = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
                raise TargetError(f"importing {name} failed: {error}", "install what it needs") from error
            missing = error.name
            continue
        except Exception as error:
            problem = f"importing {name} failed: {type(error).__name__}: {error}"
            raise TargetError(problem, "make that module import on its own") from error
        return _attribute(found, name, parts[end:])
    where = "put its directory on PYTHONPATH, or run from there"
    raise TargetError(f"there is no module {missing!r}", where)


def _attribute(found: Any, name: str, rest: list[str]) -> Any:
    for part in rest:
        if not hasattr(found, part):
            guess = nearest(part, [word for word in dir(found) if not word.startswith("_")])
            raise TargetError(f"{name} has no {part!r}", f"did you mean {name}.{guess}?" if guess else "check its name")
        found, name = getattr(found, part), f"{name}.{part}"
    return found


def _build(node: Any) -> Any:
    if isinstance(node, Mapping):
        built = {key: _build(value) for key, value in node.items() if key != "_target_"}
        return locate(node["_target_"])(**built) if "_target_" in node else built
    return [_build(item) for item in node] if isinstance(node, list) else node


def check_target(
    key: str, node: Mapping[str, Any], own: Sequence[str] = (), given: int = 0, passed: Sequence[str] = ()
) -> tuple[dict[str, Any], list[Fault]]:
    """The arguments of a `_target_` section, and what is wrong with it.

    key    dotted name of the section
    own    names in the section that are ours, not arguments
    given  how many leading parameters the caller passes itself (a loss gets logits and labels)
    passed parameters that the caller passes by name
    """
    path = node.get("_target_")
    args = {name: value for name, value in node.items() if name != "_target_" and name not in own}
    if not isinstance(path, str):
        fix = "name a class as package.module.Name"
        return args, [Fault(f"{key}._target_", path, "is not a dotted path" if path else "is not set", fix)]
    try:
        target = locate(path)
    except TargetError as error:
        return args, [Fault(f"{key}._target_", path, error.problem, error.fix)]
    if not callable(target):
        problem = f"is a {type(target).__name__}, which cannot be called"
        return args, [Fault(f"{key}._target_", path, problem, "name a class or function")]
    parameters = _parameters(target)
    if parameters is None:
        return args, []
    if not inspect.isclass(target):
        parameters = parameters[given:]
    parameters = [p for p in parameters if p.name not in passed]
    faults = _name_faults(key, path.rpartition(".")[2], parameters, args)
    if path.startswith(OWN):
        faults += _convert_own(key, target, args)
    for name, value in args.items():
        if isinstance(value, Mapping) and "_target_" in value:
            faults += check_target(f"{key}.{name}", value)[1]
    return args, faults


def _parameters(target: Any) -> list[inspect.Parameter] | None:
    try:
        return list(inspect.signature(target).parameters.values())
    except (TypeError, ValueError):  # a builtin without a signature: only the call can tell
        return None


def _name_faults(key: str, short: str, parameters: list[inspect.Parameter], args: Mapping[str, Any]) -> list[Fault]:
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    faults = []
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        for name in args:
            if name not in named:
                guess = nearest(name, named)
                takes = f"it takes {', '.join(named)}" if named else "it takes none"
                fix = f"did you mean {key}.{guess}? ({takes})" if guess else takes
                faults.append(Fault(f"{key}.{name}", args[name], f"{short} has no such argument", fix))
    for name, parameter in named.items():
        if name not in args and parameter.default is parameter.empty:
            faults.append(Fault(f"{key}.{name}", None, f"{short} needs this argument", f"add +{key}.{name}=..."))
    return faults


def _convert_own(key: str, target: Any, args: dict[str, Any]) -> list[Fault]:
    """Puts arguments of our own targets into their annotated types, in place, where the annotation is simple."""
    hints = typing.get_type_hints(target.__init__ if inspect.isclass(target) else target)
    faults = []
    for name, value in args.items():
        if name in hints and is_simple(hints[name]):
            try:
                args[name] = convert(value, hints[name])
            except Mismatch as wanted:
                problem = f"must be {wanted}, not {kind(value)}"
                faults.append(Fault(f"{key}.{name}", "null" if value is None else value, problem, f"use {wanted}"))
    return faults
