"""Refuses what capture would drop or freeze without a word.

`torch.export` drops gradient hooks, `.data` and `detach_`; and it freezes what forward makes of random numbers of
Python's, seeds and the clock. Each gives a graph that runs and is wrong.
"""

from __future__ import annotations

import os
import random
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.utils.checkpoint as checkpoint
from torch import nn
from torch.autograd.function import _SingleLevelFunction
from torch.nn.modules import module as modules

from meg_compile.errors import CaptureError, Fault
from meg_compile.graph.functions import stand_in

DIFFERENTIABLE = "write it with differentiable operators, or torch.library.custom_op"
_HIDDEN = (f"{os.sep}torch{os.sep}", f"{os.sep}meg_compile{os.sep}")
_CALLERS = tuple(f"{os.sep}{part}" for part in ("torch/nn/", "torch/utils/", "torch/_dynamo/eval_", "meg_compile/"))
"""Files that call a model's code. Others of torch's call libraries that are nothing to the model."""
_DRAWING = (__file__, "random.py", "secrets.py", "uuid.py", "contextlib.py", "functools.py", ">")
"""Files of Python's library that draw or call for whoever calls them; others (logging) do so for themselves."""
_LIBRARY = sysconfig.get_paths()["stdlib"]

RANDOM = "random numbers of Python's or numpy's, whose outcome a graph would freeze"
SEEDS = "the state of torch's generator, which a graph does not keep"
CLOCK = "the clock, whose time a graph would freeze"
TORCHS = "draw with torch, as by torch.nn.functional.dropout, and compute with the tensor"
MOVE = "move it out of forward"
BANNED: list[tuple[Any, str, str, str]] = [
    *((random.Random, name, RANDOM, TORCHS) for name in ("random", "getrandbits")),
    *((random.SystemRandom, name, RANDOM, TORCHS) for name in ("random", "getrandbits")),
    (os, "urandom", RANDOM, TORCHS),
    *((torch, name, SEEDS, MOVE) for name in ("manual_seed", "seed", "get_rng_state", "set_rng_state")),
    *((torch.random, name, SEEDS, MOVE) for name in ("manual_seed", "get_rng_state", "set_rng_state", "fork_rng")),
    *((time, name, CLOCK, MOVE) for name in ("time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic")),
    (torch.Tensor, "detach_", "Tensor.detach_, which a graph does not keep", "use y = x.detach()"),
    (torch.Tensor, "register_hook", "Tensor.register_hook, which a graph does not keep", DIFFERENTIABLE),
    (torch.autograd.graph, "register_multi_grad_hook", "a gradient hook, which a graph does not keep", DIFFERENTIABLE),
    (
        torch.autograd.graph.saved_tensors_hooks,
        "__enter__",
        "hooks on what backward keeps, which a graph does not have",
        "leave them out: plan.recompute says what is kept",
    ),
]
"""(owner, name, what it is, what to do instead): refused where the model's own code calls it."""


@contextmanager
def sentinel(model: nn.Module) -> Iterator[None]:
    """CaptureError when the model has gradient hooks, or its forward does one of these things meanwhile.

    What it may do, and a graph has its own way of: activation checkpoints become plain calls, `.data`
    is `.detach()`, and dropout in place is one that is not.
    """
    _refuse_hooks(model)
    _refuse_unregistered(model)
    before = _random_states(model)
    with ExitStack() as stack:
        for owner, name, what, fix in BANNED:
            stack.enter_context(patch.object(owner, name, _banned(getattr(owner, name), what, fix)))
        stack.enter_context(patch.object(_SingleLevelFunction, "apply", _watched))
        stack.enter_context(patch.object(torch.Tensor, "data", property(_data, _set_data), create=True))
        stack.enter_context(patch.object(torch.Tensor, "grad_fn", property(_grad_fn), create=True))
        stack.enter_context(patch.object(nn.Module, "__setattr__", _setattr))
        for owner in (torch, torch._VF):
            stack.enter_context(patch.object(owner, "dropout_", _dropout_in_place, create=True))
        stack.enter_context(
            patch.object(checkpoint, "_checkpoint_without_reentrant_generator", lambda *_: iter([None]))
        )
        try:
            yield
        finally:
            if _random_states(model) != before:
                raise refusal("forward", RANDOM, TORCHS)


def users_place(through_torch: bool = False) -> str | None:
    """file.py:line of the model's own code that called what calls this, through Python's own library; None where torch
    did, unless the caller of torch is asked for, and where a module is being imported."""
    frame, found = sys._getframe(1), None
    while frame is not None:
        name = frame.f_code.co_filename
        is_hidden = any(part in name for part in _HIDDEN) and name != __file__
        is_library = name == __file__ or (name.startswith((_LIBRARY, "<")) and "site-packages" not in name)
        if name.startswith("<frozen importlib"):
            return None
        if is_library and not through_torch and not found and not name.endswith(_DRAWING):
            return None
        if is_hidden and not through_torch:
            return found if any(part in name for part in _CALLERS) else None
        if not is_hidden and not is_library:
            found = found or f"{name}:{frame.f_lineno}"
            through_torch = False
        frame = frame.f_back
    return found


def refusal(place: str, what: str, fix: str = DIFFERENTIABLE) -> CaptureError:
    return CaptureError(Fault(place, None, f"uses {what}", fix))


def _banned(original: Callable[..., Any], what: str, fix: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if (place := users_place()) is not None:
            raise refusal(place, what, fix)
        return original(*args, **kwargs)

    return call


def _refuse_hooks(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise refusal(f"module {name or type(model).__name__}", "a gradient hook, which a graph does not keep")
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise refusal(f"parameter {name}", "a gradient hook, which a graph does not keep")
    if modules._global_backward_hooks or modules._global_backward_pre_hooks:
        raise refusal("torch.nn", "a gradient hook of all modules, which a graph does not keep")


def _refuse_unregistered(model: nn.Module) -> None:
    """Parameters and modules in plain lists and dicts: a state_dict lacks them and no optimizer moves them."""
    known = {id(t) for t in [*model.modules(), *model.parameters()]}
    for name, module in model.named_modules():
        for key, held in vars(module).items():
            if key.startswith("_") or not isinstance(held, (list, tuple, dict)):
                continue
            for value in held.values() if isinstance(held, dict) else held:
                if isinstance(value, (nn.Parameter, nn.Module)) and id(value) not in known:
                    kind = "Parameter" if isinstance(value, nn.Parameter) else "Module"
                    problem = f"holds a {kind.lower()} in a plain {type(held).__name__}, where nothing trains it"
                    fix = f"use nn.{kind}{'Dict' if isinstance(held, dict) else 'List'}"
                    raise CaptureError(Fault(f"{name}.{key}".removeprefix("."), None, problem, fix))


@classmethod
def _watched(cls: type, *args: Any, **kwargs: Any) -> Any:
    """Apply torch's own functions (those behind torch.library.custom_op among them); a user's become one operator."""
    if cls is checkpoint.CheckpointFunction:
        function, _, *rest = args
        return function(*rest)
    if not cls.__module__.startswith("torch."):
        return stand_in(cls, args)
    return super(_SingleLevelFunction, cls).apply(*args, **kwargs)  # type: ignore[misc]


_plain_data: Any = torch.Tensor.data
_plain_grad_fn: Any = torch.Tensor.grad_fn
_plain_setattr = nn.Module.__setattr__


def _data(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach() if users_place() else _plain_data.__get__(tensor)


def _set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
    if (place := users_place()) is not None:
        raise refusal(place, "an assignment to .data, which a graph does not keep", "compute a new tensor")
    _plain_data.__set__(tensor, value)


def _grad_fn(tensor: torch.Tensor) -> Any:
    if (place := users_place()) is not None:
        raise refusal(place, "grad_fn, whose hooks a graph does not keep")
    return _plain_grad_fn.__get__(tensor)


def _dropout_in_place(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """As dropout and a copy: of dropout_ itself a graph keeps only a bernoulli."""
    return x.copy_(torch.dropout(x, p, train))


def _setattr(module: nn.Module, name: str, value: Any) -> None:
    """Refuse to replace buffers and parameters in forward, and to make new parameters there."""
    parameters, buffers = (
        vars(module).get(name, {}) for name in ("_parameters", "_buffers")
    )  # torch's copies lack them
    held = {**parameters, **buffers}
    changes = held.get(name) is not None and value is not held[name]
    if (changes or isinstance(value, nn.Parameter)) and (place := users_place()) is not None:
        kind = "buffer" if name in buffers else "parameter"
        what = f"a new value of the {kind} {name}, and a step of micro-batches would lose it"
        raise refusal(place, what, "keep no state in forward, and make parameters in __init__")
    _plain_setattr(module, name, value)


def _random_states(model: nn.Module) -> list[Any]:
    """Of Python's and numpy's generators, also those that modules hold or that stand where their classes do."""
    states: list[Any] = [random.getstate()]
    if "numpy.random" not in sys.modules:
        return states
    numpy = sys.modules["numpy.random"]
    states.append(_plain(numpy.get_state()))
    places = {id(held): held for m in model.modules() for held in (vars(m), vars(sys.modules[type(m).__module__]))}
    for held in places.values():
        for value in list(held.values()):
            if isinstance(value, numpy.Generator):
                states.append(_plain(value.bit_generator.state))
            elif isinstance(value, numpy.RandomState):
                states.append(_plain(value.get_state()))
    return states


def _plain(state: Any) -> Any:
    """With numpy's arrays as lists, which compare as one."""
    if isinstance(state, (tuple, list)):
        return [_plain(value) for value in state]
    if isinstance(state, dict):
        return {name: _plain(value) for name, value in state.items()}
    return state.tolist() if hasattr(state, "tolist") else state
