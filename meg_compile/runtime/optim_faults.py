"""What cannot work about the optimizer, given the model: found before any process starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from meg_compile.errors import Fault, Refused, nearest
from meg_compile.graph.nodes import matches, starred
from meg_compile.program import Program
from meg_compile.runtime.entrywise import couples_entries, couples_parameters, random_steps
from meg_compile.runtime.optimizer import SETTINGS, build_optimizer, chosen, patterns, takes


def optim_faults(optim: Any, program: Program) -> list[Fault]:
    """Patterns that match nothing or twice, options that the optimizer does not have, parameters that it does not take,
    and one that on the parts that the plan makes would take other steps than on the whole."""
    specs = [spec for spec in program.params.values() if not spec.buffer]
    names = {spec.name: [spec.name, *spec.aliases] for spec in specs if spec.trainable}
    if not names:
        return [_nothing_to_train(optim)]
    if faults := _pattern_faults(optim, names) + _option_faults(optim):
        return faults
    small = {
        name: nn.Parameter(torch.ones([1] * len(program.params[name].shape), dtype=torch.float64)) for name in names
    }
    aliased = {alias: small[first] for first, own in names.items() for alias in own}
    key, value = ("optim.name", optim.name) if optim.target is None else ("optim._target_", optim.target)
    try:
        optimizer = build_optimizer(aliased, optim)
        for parameter in small.values():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    except Exception as error:
        problem = f"a step of it on this model raised {type(error).__name__}: {error}"
        fix = "change its arguments, as optim.NAME=VALUE, or name another, such as torch.optim.AdamW"
        return [Fault(key, value, problem, fix)]
    coupling = _coupling(optim, program)
    return [Fault(key, value, *coupling)] if coupling else []


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Stop the parameters that a pattern matches, by any of their names or a module's, from being trained.

    Refused where a pattern matches none.
    """
    named = list(model.named_parameters(remove_duplicate=False))
    faults = []
    for pattern in patterns:
        found = [parameter for name, parameter in named if matches(pattern, name)]
        for parameter in found:
            parameter.requires_grad_(False)
        faults += [] if found else [_unmatched("optim.frozen", pattern, [name for name, _ in named])]
    if faults:
        raise Refused(faults)


def _unmatched(key: str, pattern: str, names: list[str]) -> Fault:
    """A pattern that matches no parameter, with the nearest name or module that one could mean."""
    paths = {name.rsplit(".", cut)[0] for name in names for cut in range(name.count(".") + 1)}
    guess = nearest(pattern, sorted(paths | {starred(path) for path in paths}))
    fix = f"did you mean {guess}?" if guess else f"the parameters are {', '.join(names[:3])}, ..."
    return Fault(key, pattern, "matches no parameter", fix)


def _nothing_to_train(optim: Any) -> Fault:
    if optim.frozen:
        return Fault("optim.frozen", optim.frozen, "leaves nothing to train", "leave a parameter out")
    return Fault("model", None, "none of its parameters requires a gradient", "let one be trained")


def _pattern_faults(optim: Any, names: Mapping[str, list[str]]) -> list[Fault]:
    known = [name for own in names.values() for name in own]
    faults, homes = [], dict[str, tuple[int, str]]()
    asked = [(-1, "optim.no_decay", pattern) for pattern in optim.no_decay]
    for number, group in enumerate(optim.groups):
        params = group.get("params")
        if not params or not (isinstance(params, str) or all(isinstance(one, str) for one in params)):
            problem = (
                "says nowhere which parameters it is for" if not params else "must be a pattern, or a list of them"
            )
            fix = "write it as {params: '*.bias', lr_scale: 2}"
            faults.append(Fault(f"optim.groups.{number}.params", params, problem, fix))
            continue
        asked += [(number, f"optim.groups.{number}.params", pattern) for pattern in patterns(group)]
    for number, key, pattern in asked:
        found = [first for first, own in names.items() if any(matches(pattern, name) for name in own)]
        if not found:
            faults.append(_unmatched(key, pattern, known))
        for name in found if number >= 0 else ():
            home, other = homes.setdefault(name, (number, pattern))
            if home != number:
                problem = f"{name} is in optim.groups.{home} already, by {other}"
                faults.append(Fault(key, pattern, problem, "let each parameter be in one group"))
                break
    return faults


def _option_faults(optim: Any) -> list[Fault]:
    optimizer, arguments = chosen(optim)
    faults = []
    for name in SETTINGS if optim.target is not None else ():
        if getattr(optim, name) is not None and not takes(optimizer, name):
            faults.append(Fault(f"optim.{name}", getattr(optim, name), f"{optim.target} takes none", "leave it out"))
    if optim.no_decay and not takes(optimizer, "weight_decay"):
        faults.append(Fault("optim.no_decay", optim.no_decay, f"{optim.target} decays nothing", "leave it out"))
    try:
        options = set(optimizer([nn.Parameter(torch.ones(1, 1))], **arguments).defaults) - {"lr"}
    except Exception:  # said when it is built for the model
        return faults
    for number, group in enumerate(optim.groups):
        for name in group.keys() - {"params", "lr_scale"} - options:
            guess = "lr_scale, a factor of optim.lr" if name == "lr" else nearest(name, options | {"lr_scale"})
            fix = f"did you mean {guess}?" if guess else f"there are lr_scale, {', '.join(sorted(options))}"
            faults.append(Fault(f"optim.groups.{number}.{name}", group[name], "no such option of a group", fix))
        scale = group.get("lr_scale", 1.0)
        if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not 0 <= scale < float("inf"):
            problem = "is a factor of the learning rate, 0 or more"
            faults.append(Fault(f"optim.groups.{number}.lr_scale", scale, problem, "use 0.1, say"))
    return faults


def _coupling(optim: Any, program: Program) -> tuple[str, str] | None:
    """(problem, fix) of an optimizer that needs together what the plan puts on several ranks."""
    plan = program.plan
    held = [spec for spec in program.params.values() if spec.trainable and not spec.buffer]
    cuts = {"plan.tp": any(spec.sharded for spec in held), "plan.zero": any(program.splits(spec) for spec in held)}
    sizes = {"plan.tp": plan.tp, "plan.zero": plan.zero, "plan.pp": plan.pp}
    cutting = [key for key, cut in cuts.items() if cut]
    spreading = cutting + ["plan.pp"] * (plan.pp > 1)

    def said(keys: Sequence[str]) -> tuple[str, str]:
        without = " ".join(f"{key}={0 if key == 'plan.zero' else 1}" for key in keys)
        fix = f"use {without}, or an optimizer such as torch.optim.AdamW"
        return " and ".join(f"{key}={sizes[key]}" for key in keys), fix

    for options in [{}, *optim.groups]:

        def make(parameters: list[nn.Parameter], options: Mapping[str, Any] = options) -> torch.optim.Optimizer:
            alone = replace(optim, groups=[{**options, "params": "*"}] if options else [], no_decay=[], decay="all")
            return build_optimizer({f"p{i}": parameter for i, parameter in enumerate(parameters)}, alone)

        if plan.mesh.size > 1 and random_steps(make):
            return "draws random numbers, so that copies of a parameter would part", "name one that draws none"
        if spreading and couples_parameters(make):
            where, fix = said(spreading)
            return f"its steps depend on all parameters together, which {where} spreads over ranks", fix
        if cutting and couples_entries(make):
            where, fix = said(cutting)
            return f"its steps are not entry by entry, and {where} cuts parameters into parts", fix
    return None
