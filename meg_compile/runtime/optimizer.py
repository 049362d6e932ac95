"""The optimizer over a rank's own parameters, and the clipping of gradients.

Both act on single numbers, so on shards they do what they would do on whole parameters, given the norm of all
gradients together. Whether an optimizer does is found out beforehand (`runtime/entrywise.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from meg_compile.config.targets import locate
from meg_compile.graph.nodes import matches

NAMED: dict[str, tuple[type[torch.optim.Optimizer], tuple[str, ...]]] = {
    "adamw": (torch.optim.AdamW, ("betas", "eps")),
    "sgd": (torch.optim.SGD, ("momentum",)),
}
"""The optimizers by name, and which of the settings beside it are theirs."""
SETTINGS: tuple[str, ...] = ("weight_decay", "betas", "eps", "momentum")


def build_optimizer(parameters: Mapping[str, nn.Parameter], optim: Any) -> torch.optim.Optimizer:
    """The optimizer of the config's section `optim` over those of these parameters that are trained.

    parameters: by the user's names; a tied one may be there under all of them, and is moved once.

    The named optimizers run fused, where all is floating-point: SGD then takes the same steps as torch's loop over
    parameters to the last bit, AdamW to rounding error. A class by `_target_` runs as torch chooses, unless told by
    `foreach` or `fused`. A rank without parameters gets an optimizer that does nothing.
    """
    optimizer, arguments = chosen(optim)
    groups = parameter_groups(parameters, optim, optimizer)
    if optim.target is None:
        arguments["fused"] = all(p.is_floating_point() for group in groups for p in group["params"])
    return optimizer(groups, **arguments)


def chosen(optim: Any) -> tuple[Any, dict[str, Any]]:
    """The optimizer's class and its arguments, without the parameters."""
    if optim.target is None:
        optimizer, own = NAMED[optim.name]
    else:
        optimizer = locate(optim.target)
        own = [name for name in SETTINGS if takes(optimizer, name)]
    settings = {name: getattr(optim, name) for name in own if getattr(optim, name) is not None}
    return optimizer, {"lr": optim.lr, **_tuples(settings | optim.args)}


def takes(optimizer: Any, name: str) -> bool:
    """Whether its constructor has an argument."""
    parameters = inspect.signature(optimizer).parameters.values()
    return any(parameter.name == name or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def parameter_groups(parameters: Mapping[str, nn.Parameter], optim: Any, optimizer: Any) -> list[dict[str, Any]]:
    """torch's parameter groups: those that decay, those that do not, then of each group of `optim.groups` the same two.

    Weight decay leaves out what `decay` "matrices" does, all with less than two dims (biases, norms), and what
    `no_decay` matches; a `weight_decay` of a group of its own holds for all in it. An optimizer that takes no
    `weight_decay` is given none.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in parameters.items():
        if parameter.requires_grad:
            names.setdefault(parameter, []).append(name)
    found: list[dict[str, Any]] = []
    for number, group in enumerate([{}, *optim.groups]):
        mine = [p for p, own in names.items() if group_of(own, optim.groups) == number - 1]
        options = _tuples({name: value for name, value in group.items() if name != "params"})
        if "weight_decay" in options or not takes(optimizer, "weight_decay"):
            found.append({"params": mine, **options})
            continue
        spared = [p for p in mine if (optim.decay == "matrices" and p.dim() < 2) or _any(optim.no_decay, names[p])]
        found.append({"params": [p for p in mine if not any(p is q for q in spared)], **_decay(optim), **options})
        found.append({"params": spared, "weight_decay": 0.0, **options})
    return found


def group_of(names: list[str], groups: list[dict[str, Any]]) -> int:
    """The number of the group that matches a parameter by one of its names; -1 for none."""
    return next((i for i, group in enumerate(groups) if _any(patterns(group), names)), -1)


def patterns(group: Mapping[str, Any]) -> list[str]:
    """The patterns of a group's `params`: one, or a list."""
    return [group["params"]] if isinstance(group["params"], str) else list(group["params"])


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Every group's rate: lr times its `lr_scale`."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)


def clip_(parameters: Mapping[str, nn.Parameter], norm: float, clip_grad: float) -> None:
    """Scale the gradients by clip_grad / (norm + 1e-6) where that is below 1, as torch's clip_grad_norm_ does.

    norm: that of all gradients of the model, not of this rank's. clip_grad 0: no clipping.
    """
    if clip_grad:
        total_norm = torch.tensor(norm, dtype=torch.float64)
        torch.nn.utils.clip_grads_with_norm_(dict.fromkeys(parameters.values()), clip_grad, total_norm)


def _any(globs: list[str], names: list[str]) -> bool:
    return any(matches(glob, name) for glob in globs for name in names)


def _decay(optim: Any) -> dict[str, float]:
    """null is the optimizer's own."""
    return {} if optim.weight_decay is None else {"weight_decay": optim.weight_decay}


def _tuples(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
