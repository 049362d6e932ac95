"""Refuses what capture would drop or freeze without a word.

`torch.export` inlines a custom autograd.Function's forward and loses its backward; it drops gradient hooks; and it
freezes the outcome of Python's and numpy's random numbers. Each gives a graph that runs and is wrong.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.autograd.function import _SingleLevelFunction

from meg_compile.errors import CaptureError, Fault


@contextmanager
def sentinel(model: nn.Module) -> Iterator[None]:
    """CaptureError when the model has gradient hooks, or its forward does one of these things meanwhile."""
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise _refusal(f"module {name or type(model).__name__}", "a gradient hook, which a graph does not keep")
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise _refusal(f"parameter {name}", "a gradient hook, which a graph does not keep")
    before = _random_states()
    with (
        patch.object(_SingleLevelFunction, "apply", _watched),
        patch.object(torch.Tensor, "register_hook", _hooked),
    ):
        yield
    if _random_states() != before:
        raise _refusal("forward", "Python's or numpy's random numbers, whose outcome a graph would freeze")


@classmethod
def _watched(cls: type, *args: Any, **kwargs: Any) -> Any:
    """Apply torch's own functions (those behind torch.library.custom_op among them), and no others."""
    if not cls.__module__.startswith("torch."):
        raise _refusal("forward", f"the autograd.Function {cls.__name__}, whose backward a graph does not keep")
    return super(_SingleLevelFunction, cls).apply(*args, **kwargs)  # type: ignore[misc]


def _hooked(*args: Any, **kwargs: Any) -> Any:
    raise _refusal("forward", "Tensor.register_hook, which a graph does not keep")


def _random_states() -> list[Any]:
    states: list[Any] = [random.getstate()]
    if "numpy.random" in sys.modules:
        kind, keys, *rest = sys.modules["numpy.random"].get_state()
        states.append((kind, keys.tolist(), *rest))
    return states


def _refusal(place: str, what: str) -> CaptureError:
    fix = "write it with differentiable operators, or torch.library.custom_op"
    return CaptureError(Fault(place, None, f"uses {what}", fix))
