"""Refuses what capture would drop or freeze without a word.

`torch.export` inlines a custom autograd.Function's forward and loses its backward; it drops gradient hooks; and it
freezes the outcome of Python random numbers. Each gives a graph that runs and is wrong.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from meg_compile.errors import CaptureError, Fault


@contextmanager
def sentinel(model: nn.Module) -> Iterator[None]:
    """CaptureError when, while this is active, the model's forward does one of these things."""
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise _refusal(f"module {name or type(model).__name__}", "has a backward hook, which a graph does not keep")
    patches: list[tuple[Any, str, str]] = [
        (
            torch.autograd.Function,
            "apply",
            "a custom autograd.Function, whose backward a graph does not keep",
        ),
        (torch.Tensor, "register_hook", "Tensor.register_hook, which a graph does not keep"),
        (random, "random", "random.random(), whose outcome a graph would freeze"),
        (random, "randint", "random.randint(), whose outcome a graph would freeze"),
        (random, "uniform", "random.uniform(), whose outcome a graph would freeze"),
    ]
    with ExitStack() as stack:
        for owner, attribute, what in patches:
            stack.enter_context(patch.object(owner, attribute, _tripwire(what)))
        yield


def _tripwire(what: str) -> Callable[..., Any]:
    def trip(*args: Any, **kwargs: Any) -> Any:
        raise _refusal("forward", f"uses {what}")

    return trip


def _refusal(place: str, problem: str) -> CaptureError:
    return CaptureError(
        Fault(place, None, problem, "write it with differentiable operators, or torch.library.custom_op")
    )
