"""Matrix products whose weight gradients are left for later, so that a pipeline fills its bubble with them.

Only the product of a weight's gradient waits (Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2); all else
in backward, every collective among it, runs once and in the order it always has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F


class Later:
    """The weight gradients of one stage that wait.

    parameters: all that the rank trains. Autograd may take the memory of a gradient that waits here for the gradient of
    a parameter of that size, and would add the next micro-batch's to it: such a parameter gets a copy of its own.
    """

    def __init__(self, parameters: Iterable[torch.Tensor] = ()) -> None:
        self._parameters = tuple(parameters)
        self._waiting: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def add(self, weight: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
        """weight [m, n] is to get left [rows, m] transposed times right [rows, n]."""
        self._waiting.append((weight, left, right))

    def take(self) -> Callable[[], None]:
        """What computes all that waits now, when it is called."""
        taken, self._waiting = self._waiting, []
        held = {_memory(factor) for _, *factors in taken for factor in factors}
        for parameter in self._parameters:
            if parameter.grad is not None and _memory(parameter.grad) in held:
                parameter.grad = parameter.grad.clone()

        def compute() -> None:
            with torch.no_grad():
                while taken:
                    weight, left, right = taken.pop(0)
                    if weight.grad is None:
                        weight.grad = (left.t() @ right).to(weight.dtype)
                    elif weight.dtype == left.dtype:
                        weight.grad.addmm_(left.t(), right)
                    else:
                        weight.grad += left.t() @ right

        return compute


def _memory(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        master: torch.Tensor,
        later: Later,
    ):
        ctx.save_for_backward(x)
        ctx.weight, ctx.master, ctx.later = weight, master, later  # what is saved may come back as another tensor
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,), weight = ctx.saved_tensors, ctx.weight
        rows = grad.reshape(-1, grad.shape[-1])
        ctx.later.add(ctx.master, rows, x.reshape(-1, x.shape[-1]))
        wants_x, _, wants_bias, *_ = ctx.needs_input_grad
        return grad @ weight if wants_x else None, None, rows.sum(0) if wants_bias else None, None, None


class _Addmm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, bias: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, master: torch.Tensor, later: Later
    ):
        ctx.save_for_backward(x)
        ctx.weight, ctx.master, ctx.later = weight, master, later
        return torch.addmm(bias, x, weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,), weight = ctx.saved_tensors, ctx.weight
        ctx.later.add(ctx.master, x, grad)
        wants_bias, wants_x, *_ = ctx.needs_input_grad
        return grad.sum(0) if wants_bias else None, grad @ weight.t() if wants_x else None, None, None, None


@torch.compiler.disable  # what it leaves behind is no tensor
def linear_later(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, master: torch.Tensor, later: Later
) -> torch.Tensor:
    """F.linear: x [..., in], weight [out, in], bias [out]. master: the parameter that gets the weight's gradient."""
    return _Linear.apply(x, weight, bias, master, later)


@torch.compiler.disable
def addmm_later(
    bias: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, master: torch.Tensor, later: Later
) -> torch.Tensor:
    """torch.addmm: bias [out], x [rows, in], weight [in, out]; master as in `linear_later`."""
    return _Addmm.apply(bias, x, weight, master, later)
