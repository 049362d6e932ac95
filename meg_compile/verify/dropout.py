"""Dropout of the plain model in a comparison: off, or with the masks that the compiled program draws."""

import math
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from meg_compile.errors import MegError
from meg_compile.ops.counted import Places, exact_attention, exact_dropout

_ATTENTION = F.scaled_dot_product_attention
PLAIN = {F.dropout, torch.dropout, torch.dropout_}
OTHERS = {
    torch.alpha_dropout,
    torch.alpha_dropout_,
    torch.feature_dropout,
    torch.feature_dropout_,
    torch.feature_alpha_dropout,
    torch.feature_alpha_dropout_,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.alpha_dropout,
    F.feature_alpha_dropout,
}


class DropoutMode(TorchFunctionMode):
    """While it is active, what would drop something does something else. It works on eager modules and in a capture."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in PLAIN or func in OTHERS:
            x = args[0] if args else kwargs["input"]
            p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
            training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
            return self.drop(func, x, p) if p and training else x
        if func is _ATTENTION:
            names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
            kwargs |= dict(zip(names, args, strict=False))
            p = kwargs.pop("dropout_p", 0.0)
            return self.attend(p, **kwargs) if p else func(**kwargs)
        if func is F.multi_head_attention_forward:  # no mode is active inside it
            with patch.multiple(F, dropout=self._as(F.dropout), scaled_dot_product_attention=self._as(_ATTENTION)):
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def _as(self, func: Any) -> Any:
        return lambda *args, **kwargs: self.__torch_function__(func, (), args, kwargs)

    def drop(self, func: Any, x: Tensor, p: float) -> Tensor:
        raise NotImplementedError

    def attend(self, p: float, **given: Any) -> Tensor:
        raise NotImplementedError


class DropoutOff(DropoutMode):
    """Drops nothing; `num_switched_off` counts the calls that would have."""

    def __init__(self) -> None:
        super().__init__()
        self.num_switched_off = 0

    def drop(self, func: Any, x: Tensor, p: float) -> Tensor:
        self.num_switched_off += 1
        return x

    def attend(self, p: float, **given: Any) -> Tensor:
        self.num_switched_off += 1
        return _ATTENTION(**given)


class DropoutExact(DropoutMode):
    """Draws the masks of a compiled program, call by call.

    draws: `Program.draws`. keys: `row_keys` of the rows that the model is called with.
    """

    def __init__(self, draws: list[tuple[Places, bool]], keys: Tensor):
        super().__init__()
        self.draws, self.keys, self.site = draws, keys, 0

    def drop(self, func: Any, x: Tensor, p: float) -> Tensor:
        if func in OTHERS:
            raise MegError(f"the plain model calls {func.__name__}, which the compiled program does not")
        return exact_dropout(x, *self._next(p, x.shape))

    def attend(self, p: float, **given: Any) -> Tensor:
        options = (given.get("is_causal", False), given.get("scale"), given.get("enable_gqa", False))
        inputs = (given["query"], given["key"], given["value"], given.get("attn_mask"))
        weights = (*given["query"].shape[:-1], given["key"].shape[-2])
        return exact_attention(*inputs, *options, *self._next(p, weights))

    def _next(self, p: float, shape: Sequence[int]) -> tuple[Any, ...]:
        if self.site >= len(self.draws):
            raise MegError(f"the plain model drops more than the {len(self.draws)} times that were captured")
        places, of_rows = self.draws[self.site]
        self.site += 1
        return self.keys, p, self.site - 1, _with_rows(places, shape), of_rows


def _with_rows(places: Places, shape: Sequence[int]) -> Places:
    """Captured with one row, a value does not show where its rows are: in the dim that is longer now, outermost."""
    grown = [size // math.prod(n for n, _ in dim) for dim, size in zip(places, shape, strict=True)]
    captured_with_one = not any(part == "batch" for dim in places for _, part in dim)
    return [
        [(more, "batch"), *dim] if more > 1 and captured_with_one else dim
        for dim, more in zip(places, grown, strict=True)
    ]
